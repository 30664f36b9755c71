"""The log: one line an event, as JSON or for people, no control characters, no secrets.

Every module logs with the standard library's `logging`, as our libraries do, and gives fields such
as `engine` and `request_id` in `extra`; structlog makes the line. `access.py` has the requests,
`writer.py` the way out, `levels.py` what is worth a line.
"""

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import structlog
from structlog.typing import EventDict, Processor

from app.settings import ConfigError, LogSettings
from app.telemetry.levels import Levels
from app.telemetry.scrub import scrub, scrub_lines
from app.telemetry.times import local, utc
from app.telemetry.writer import LogFile, Writer, check_file

# What a call may say beside its words. Others may be anything, a library's included.
FIELDS = ("request_id", "model", "engine", "key", "trace_id")
# `engine %s` and `model %s` in the words of a call are fields as well; the rest counts arguments.
_CONVERSION = re.compile(r"%%|(?:\b(engine|model) )?%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]")
_encode = msgspec.json.Encoder().encode


class _Handler(logging.Handler):
    """Hands lines to the writer."""

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 - a call that logs must not fail for what it says
            place = f"{record.pathname}:{record.lineno}"
            text = f"a line of the log could not be made at {place}: {type(error).__name__}"
            line = self.format(_record(logging.ERROR, text))
        self._writer.put(f"{line}\n")


class _NotOurTruncation(logging.Filter):
    """A stream that fails midway is left unfinished on purpose, so that the client can see it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "without completing response" not in record.getMessage()


@contextlib.contextmanager
def configured(settings: LogSettings) -> Iterator[Writer]:
    """Send the log where it belongs, in one form, libraries' included, until the end of the block.

    Raises ConfigError for a file that cannot be written.
    """
    formatter = line_formatter(as_json=is_json(settings))

    def tell(level: int, text: str) -> str:
        return formatter.format(_record(level, text))

    file = None
    if settings.file is not None:
        try:
            file = LogFile(settings.file)
        except OSError as error:
            raise ConfigError([_unusable(settings, error.strerror)]) from None
    # None where the process was started without one: another file may have its number by now.
    stderr = sys.stderr.fileno() if sys.stderr else None
    with Writer(stderr, file, tell) as writer:
        handler = _Handler(writer)
        handler.setFormatter(formatter)
        logging.root.handlers[:] = [handler]
        truncation = _NotOurTruncation()
        logging.getLogger("uvicorn.error").addFilter(truncation)
        logging.captureWarnings(True)
        Levels(settings).apply()
        try:
            yield writer
        finally:
            logging.captureWarnings(False)
            logging.getLogger("uvicorn.error").removeFilter(truncation)
            logging.root.removeHandler(handler)


def check(settings: LogSettings) -> None:
    """Raise ConfigError for a file that cannot be written."""
    if settings.file is not None and (fault := check_file(settings.file)) is not None:
        raise ConfigError([_unusable(settings, fault)])


def is_json(settings: LogSettings) -> bool:
    """Return whether lines are JSON: with `auto`, where nobody reads them on a terminal."""
    if settings.format == "auto":
        return settings.file is not None or not (sys.stderr and sys.stderr.isatty())
    return settings.format == "json"


def line_formatter(*, as_json: bool) -> logging.Formatter:
    """Return what makes a line of a record."""
    before: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(FIELDS),
        _named,
        structlog.processors.format_exc_info,
    ]
    after: list[Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        _scrubbed,
        _as_json if as_json else _as_text,
    ]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[_timed, *before], processors=after, pass_foreign_args=True
    )


def _timed(_: Any, __: str, event: EventDict) -> EventDict:
    event["time"] = event["_record"].created
    return event


def _named(_: Any, __: str, event: EventDict) -> EventDict:
    """Add the fields that the words of a call name."""
    args = event.pop("positional_args", None)
    template = event["_record"].msg
    if isinstance(args, tuple) and args and isinstance(template, str):
        found = (match for match in _CONVERSION.finditer(template) if match[0] != "%%")
        for match, value in zip(found, args, strict=False):
            if match[1]:
                event.setdefault(match[1], str(value))
    return event


def _scrubbed(_: Any, __: str, event: EventDict) -> EventDict:
    """Scrub everything that is said, ours and others'."""
    return {
        name: scrub_lines(value)
        if name == "exception"
        else scrub(value)
        if isinstance(value, str)
        else value
        for name, value in event.items()
    }


def _as_json(_: Any, __: str, event: EventDict) -> str:
    moment = event.pop("time")
    stamp = f"{utc(int(moment))}.{int(moment % 1 * 1000):03d}Z"
    head = {name: event.pop(name) for name in ("level", "logger", "event")}
    return _encode({"time": stamp, **head, **event}).decode()


def _as_text(_: Any, __: str, event: EventDict) -> str:
    """Return a line for people; a field that the words name already is not told twice."""
    moment = event["time"]
    said = event["event"]
    more = "".join(
        f" {name}={event[name]}"
        for name in FIELDS
        if name in event and str(event[name]) not in said
    )
    trace = f"\n{event['exception']}" if "exception" in event else ""
    return (
        f"{local(int(moment))},{int(moment % 1 * 1000):03d} {event['level'].upper():<7} "
        f"{event['logger']}: {said}{more}{trace}"
    )


def _record(level: int, text: str) -> logging.LogRecord:
    return logging.LogRecord(__name__, level, __file__, 0, text, (), None)


def _unusable(settings: LogSettings, fault: str | None) -> str:
    return f"logs.file {settings.file}: {fault}"
