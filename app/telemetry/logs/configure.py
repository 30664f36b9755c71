"""Configures the process' log: one destination and one format, libraries included."""

import contextlib
import logging
import sys
from collections.abc import Iterator

from app.settings import ConfigError, LogSettings
from app.telemetry.logs.formatter import line_formatter, own_record
from app.telemetry.logs.levels import Levels
from app.telemetry.logs.writer import LogFile, LogWriter, check_file


class _Handler(logging.Handler):
    """Passes formatted lines to the writer."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 - a caller must not fail because of its log line
            place = f"{record.pathname}:{record.lineno}"
            text = f"could not format a log line at {place}: {type(error).__name__}"
            line = self.format(own_record(logging.ERROR, text))
        self._writer.put(f"{line}\n")


class _TruncationFilter(logging.Filter):
    """Drops uvicorn's error about a stream that the gateway cut on purpose to signal a failure."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "without completing response" not in record.getMessage()


@contextlib.contextmanager
def configured_log(settings: LogSettings) -> Iterator[LogWriter]:
    """Configure the log until the block ends. Raises ConfigError for an unwritable file."""
    formatter = line_formatter(as_json=is_json(settings))

    def format_line(level: int, text: str) -> str:
        return formatter.format(own_record(level, text))

    file = None
    if settings.file is not None:
        try:
            file = LogFile(settings.file)
        except OSError as error:
            raise ConfigError([_file_fault(settings, error.strerror)]) from None
    # None where the process was started without one: another file may have its number by now.
    stderr = sys.stderr.fileno() if sys.stderr else None
    with LogWriter(stderr, file, format_line) as writer:
        handler = _Handler(writer)
        handler.setFormatter(formatter)
        logging.root.handlers[:] = [handler]
        truncation = _TruncationFilter()
        logging.getLogger("uvicorn.error").addFilter(truncation)
        logging.captureWarnings(True)
        Levels(settings).apply()
        try:
            yield writer
        finally:
            logging.captureWarnings(False)
            logging.getLogger("uvicorn.error").removeFilter(truncation)
            logging.root.removeHandler(handler)


def check_log_file(settings: LogSettings) -> None:
    """Raise ConfigError if `logs.file` cannot be written."""
    if settings.file is not None and (fault := check_file(settings.file)) is not None:
        raise ConfigError([_file_fault(settings, fault)])


def is_json(settings: LogSettings) -> bool:
    """Return whether lines are JSON; with `auto`, they are unless they go to a terminal."""
    if settings.format == "auto":
        return settings.file is not None or not (sys.stderr and sys.stderr.isatty())
    return settings.format == "json"


def _file_fault(settings: LogSettings, fault: str | None) -> str:
    return f"logs.file {settings.file}: {fault}"
