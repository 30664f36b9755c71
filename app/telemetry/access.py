"""One line a request, whatever became of it: no control characters, no secrets.

Past the logging module, which took 45 µs for a line here, of 190 for the whole request.
Lines wait up to FLUSH_S for others, so that a busy gateway makes ten system calls a second for
them; what a SIGKILL loses is those.
"""

import asyncio
import random
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

# The name of a model that no model has: in metrics and logs, never a name that a client made up.
UNKNOWN_MODEL = "unknown"

FLUSH_S = 0.1
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
# Ids must differ and need not be secret, so no system call is spent on one.
_random = random.Random()  # noqa: S311


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's x-request-id where it is harmless, a new one otherwise."""
    for name, value in headers:
        if name == b"x-request-id" and _CLIENT_ID.fullmatch(value):
            return value.decode()
    return f"{_random.getrandbits(128):032x}"


class Tokens(Protocol):
    """What a record tells of a request's tokens."""

    @property
    def prompt(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def completion(self) -> int: ...
    @property
    def reasoning(self) -> int: ...
    @property
    def estimated(self) -> bool: ...


@dataclass(slots=True)
class RequestRecord:
    """What is told of one request when it has ended, whatever happened to it."""

    request_id: str
    endpoint: str
    started: float
    principal: str = "-"
    model: str = UNKNOWN_MODEL
    engine: str | None = None  # the last one that was asked
    status: int = 0
    queued_s: float | None = None  # None: it did not have to wait for an engine
    ttft_s: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    usage: Tokens | None = None
    fault: str | None = None

    def line(self, seconds: float) -> str:
        """Return the access line. An estimated number of tokens has a ~ before it."""
        tokens = "-"
        if (used := self.usage) is not None:
            tokens = f"{'~' if used.estimated else ''}{used.prompt}+{used.completion}"
        fault = f" fault={self.fault!r}" if self.fault else ""
        return (
            f"{self.status} {self.endpoint} model={self.model} engine={self.engine or '-'} "
            f"key={self.principal} tokens={tokens} queue_ms={_ms(self.queued_s)} "
            f"ttft_ms={_ms(self.ttft_s)} total_ms={_ms(seconds)} "
            f"bytes={self.bytes_out} id={self.request_id}{fault}"
        )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


class AccessLog:
    """Writes the lines to standard error, in the format of the log."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._second = 0
        self._date = ""

    def write(self, record: RequestRecord, seconds: float) -> None:
        """Write a request's line, within FLUSH_S."""
        now = time.time()
        if int(now) != self._second:
            self._second = int(now)
            self._date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        if not self._lines:
            asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        self._lines.append(
            f"{self._date},{int(now % 1 * 1000):03d} INFO    access: {record.line(seconds)}\n"
        )

    def flush(self) -> None:
        """Write what waits."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        sys.stderr.write("".join(lines))
        sys.stderr.flush()
