"""Formats log records as JSON or as text for people, without control characters and secrets."""

import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from app.telemetry.logs.scrub import scrub, scrub_lines

# Attributes of a record (`extra=`) that become fields of its line. Others may hold anything.
FIELDS = (
    "request_id", "model", "engine", "key", "trace_id", "action", "target", "by", "address",
)  # fmt: skip
_encode = msgspec.json.Encoder().encode


def line_formatter(*, as_json: bool) -> logging.Formatter:
    """Return the formatter of all lines but the access log's."""
    return _Formatter(_format_json if as_json else _format_text)


def own_record(level: int, text: str) -> logging.LogRecord:
    """Return a record of the log itself."""
    return logging.LogRecord(__name__, level, __file__, 0, text, (), None)


class _Formatter(logging.Formatter):
    """Turns a record's fields, scrubbed, into a line."""

    def __init__(self, format_fields: Callable[[float, Mapping[str, object]], str]) -> None:
        super().__init__()
        self._format_fields = format_fields

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        fields: dict[str, object] = {
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        fields |= {name: record.__dict__[name] for name in FIELDS if name in record.__dict__}
        scrubbed = {
            name: scrub(value) if isinstance(value, str) else value
            for name, value in fields.items()
        }
        if record.exc_info and record.exc_info[0] is not None:
            scrubbed["exception"] = scrub_lines(self.formatException(record.exc_info))
        return self._format_fields(record.created, scrubbed)


def _format_json(time_s: float, fields: Mapping[str, object]) -> str:
    stamp = f"{utc(int(time_s))}.{int(time_s % 1 * 1000):03d}Z"
    return _encode({"time": stamp, **fields}).decode()


def _format_text(time_s: float, fields: Mapping[str, object]) -> str:
    """Return a line for people; fields that the event text contains are not repeated."""
    event = str(fields["event"])
    more = "".join(
        f" {name}={fields[name]}"
        for name in FIELDS
        if name in fields and str(fields[name]) not in event
    )
    trace = f"\n{fields['exception']}" if "exception" in fields else ""
    return (
        f"{local(int(time_s))},{int(time_s % 1 * 1000):03d} {str(fields['level']).upper():<7} "
        f"{fields['logger']}: {event}{more}{trace}"
    )


def utc(second: int) -> str:
    """Return a timestamp for machines (RFC 3339, section 5.6), without the final Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def local(second: int) -> str:
    """Return a timestamp for people, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
