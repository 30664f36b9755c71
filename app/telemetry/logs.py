"""Logging: one line an event, no control characters, no secrets. `access.py` has the requests."""

import logging
import re
import sys

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class _OneLine(logging.Formatter):
    """A record is one line whatever a client or an engine put into it; a stack trace is ours."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        head, *trace = text.split("\n") if record.exc_info else [text]
        return "\n".join([_CONTROL.sub("·", head), *trace])


class _NotOurTruncation(logging.Filter):
    """A stream that fails midway is left unfinished on purpose, so that the client can see it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "without completing response" not in record.getMessage()


def configure(level: str = "INFO") -> None:
    """Send the log to standard error in one format, uvicorn's included."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("alembic", "httpx", "httpcore", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.setLevel(logging.WARNING)  # its notices of start and stop are told better by ours
    uvicorn.addFilter(_NotOurTruncation())
