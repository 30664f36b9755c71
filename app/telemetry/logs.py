"""Logging: one line an event, one line a request, no control characters, no secrets."""

import logging
import re
import sys
from dataclasses import dataclass

# The name of a model that no model has: in metrics and logs, never a name that a client made up.
UNKNOWN_MODEL = "unknown"

access = logging.getLogger("gateway.access")

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
    for noisy in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.setLevel(logging.WARNING)  # its notices of start and stop are told better by ours
    uvicorn.addFilter(_NotOurTruncation())


@dataclass(slots=True)
class RequestRecord:
    """What is told of one request when it has ended, whatever happened to it."""

    request_id: str
    endpoint: str
    started: float
    principal: str = "-"
    model: str = UNKNOWN_MODEL
    engine: str = "-"
    status: int = 0
    ttft_s: float | None = None
    bytes_out: int = 0
    fault: str | None = None

    def line(self, seconds: float) -> str:
        """Return the access line."""
        ttft = "-" if self.ttft_s is None else f"{self.ttft_s * 1000:.1f}"
        fault = f" fault={self.fault!r}" if self.fault else ""
        return (
            f"{self.status} {self.endpoint} model={self.model} engine={self.engine} "
            f"key={self.principal} ttft_ms={ttft} total_ms={seconds * 1000:.1f} "
            f"bytes={self.bytes_out} id={self.request_id}{fault}"
        )
