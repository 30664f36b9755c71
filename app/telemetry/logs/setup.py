"""The log: one line an event, as JSON or for people, no control characters, no secrets.

Every module logs with the standard library's `logging`, as our libraries do, and gives fields such
as `engine` and `request_id` in `extra`. `access.py` has the requests, `writer.py` the way out,
`levels.py` what is worth a line.
"""

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping

import msgspec

from app.settings import ConfigError, LogSettings
from app.telemetry.logs.levels import Levels
from app.telemetry.logs.scrub import scrub, scrub_lines
from app.telemetry.logs.timestamps import local, utc
from app.telemetry.logs.writer import LogFile, Writer, check_file

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
    return _Formatter(_as_json if as_json else _as_text)


class _Formatter(logging.Formatter):
    """Makes a line of a record's fields, scrubbed."""

    def __init__(self, line_of: Callable[[float, Mapping[str, object]], str]) -> None:
        super().__init__()
        self._line_of = line_of

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        fields: dict[str, object] = {
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        fields |= {name: record.__dict__[name] for name in FIELDS if name in record.__dict__}
        for name, value in _named(record):
            fields.setdefault(name, value)
        scrubbed = {
            name: scrub(value) if isinstance(value, str) else value
            for name, value in fields.items()
        }
        if record.exc_info and record.exc_info[0] is not None:
            scrubbed["exception"] = scrub_lines(self.formatException(record.exc_info))
        return self._line_of(record.created, scrubbed)


def _named(record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    """Return the fields that the words of a call name."""
    if isinstance(record.args, tuple) and record.args and isinstance(record.msg, str):
        found = (match for match in _CONVERSION.finditer(record.msg) if match[0] != "%%")
        for match, value in zip(found, record.args, strict=False):
            if match[1]:
                yield match[1], str(value)


def _as_json(moment: float, fields: Mapping[str, object]) -> str:
    stamp = f"{utc(int(moment))}.{int(moment % 1 * 1000):03d}Z"
    return _encode({"time": stamp, **fields}).decode()


def _as_text(moment: float, fields: Mapping[str, object]) -> str:
    """Return a line for people; a field that the words name already is not told twice."""
    said = str(fields["event"])
    more = "".join(
        f" {name}={fields[name]}"
        for name in FIELDS
        if name in fields and str(fields[name]) not in said
    )
    trace = f"\n{fields['exception']}" if "exception" in fields else ""
    return (
        f"{local(int(moment))},{int(moment % 1 * 1000):03d} {str(fields['level']).upper():<7} "
        f"{fields['logger']}: {said}{more}{trace}"
    )


def _record(level: int, text: str) -> logging.LogRecord:
    return logging.LogRecord(__name__, level, __file__, 0, text, (), None)


def _unusable(settings: LogSettings, fault: str | None) -> str:
    return f"logs.file {settings.file}: {fault}"
