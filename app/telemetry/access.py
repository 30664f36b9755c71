"""One line a request, whatever became of it: no control characters, no secrets.

Past the logging module, which took 45 µs for a line here, of 190 for the whole request; but the
level of the logger `access` holds. Lines wait up to FLUSH_S for others, so that a busy gateway
wakes the log's writer ten times a second for them; what a SIGKILL loses is those.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from app.telemetry.scrub import clean, scrub
from app.telemetry.times import local, utc
from app.telemetry.trace import RequestTrace
from app.telemetry.writer import Output

# The name of a model that no model has: in metrics and logs, never a name that a client made up.
UNKNOWN_MODEL = "unknown"

FLUSH_S = 0.1
# What is told of a fault, which may quote a client.
LONGEST_FAULT = 300
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
    # That of the engine below; the one asked for where no engine was reached, or none could serve.
    model: str = UNKNOWN_MODEL
    engine: str | None = None  # the last that was reached, of a fallback perhaps
    asked: str | None = None  # the name or alias of a model that the client sent; None: no such one
    status: int = 0
    queued_s: float | None = None  # None: it did not have to wait for an engine
    ttft_s: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    usage: Tokens | None = None
    fault: str | None = None
    error: str | None = None  # the kind of fault, one of a bounded number of words
    method: str = "POST"
    client_gone: bool = False  # it left, or stopped reading, before its answer was whole
    trace: RequestTrace | None = None  # None: traces are off
    trace_id: str | None = None  # of a trace that is sampled, in hexadecimal


class _Line(msgspec.Struct, omit_defaults=True):
    """The access line as JSON, in the names of all lines; `logs.py` has the others."""

    time: str
    level: str
    logger: str
    event: str
    request_id: str
    key: str | None
    model: str
    engine: str | None
    method: str
    endpoint: str
    status: int
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    estimated: bool
    queue_ms: float | None
    ttft_ms: float | None
    total_ms: float
    bytes_in: int
    bytes_out: int
    client_gone: bool
    asked: str | None = None
    fault: str | None = None
    trace_id: str | None = None


_encode = msgspec.json.Encoder().encode


def json_line(record: RequestRecord, seconds: float, stamp: str, level: str) -> str:
    """Return the access line as JSON."""
    usage, engine = record.usage, record.engine
    queued, ttft = record.queued_s, record.ttft_s
    return _encode(
        _Line(
            stamp,
            level,
            "access",
            "request",
            record.request_id,
            None if record.principal == "-" else record.principal,
            clean(record.model),
            None if engine is None else clean(engine),
            record.method,
            record.endpoint,
            record.status,
            None if usage is None else usage.prompt,
            None if usage is None else usage.cached,
            None if usage is None else usage.completion,
            usage is not None and usage.estimated,
            None if queued is None else round(queued * 1000, 1),
            None if ttft is None else round(ttft * 1000, 1),
            round(seconds * 1000, 1),
            record.bytes_in,
            record.bytes_out,
            record.client_gone,
            clean(asked) if (asked := _asked(record)) else None,
            _fault(record.fault) if record.fault else None,
            record.trace_id,
        )
    ).decode()


def text_line(record: RequestRecord, seconds: float, stamp: str, level: str) -> str:
    """Return the access line for people. An estimated number of tokens has a ~ before it."""
    tokens = "-"
    if (used := record.usage) is not None:
        cached = f" cached={used.cached}" if used.cached else ""
        tokens = f"{'~' if used.estimated else ''}{used.prompt}+{used.completion}{cached}"
    gone = " client=gone" if record.client_gone else ""
    trace = f" trace={record.trace_id}" if record.trace_id else ""
    asked = f" asked={clean(name)}" if (name := _asked(record)) else ""
    fault = f" fault={_fault(record.fault)!r}" if record.fault else ""
    return (
        f"{stamp} {level.upper():<7} access: {record.status} {record.method} {record.endpoint} "
        f"model={clean(record.model)}{asked} engine={clean(record.engine or '-')} "
        f"key={record.principal} tokens={tokens} queue_ms={_ms(record.queued_s)} "
        f"ttft_ms={_ms(record.ttft_s)} total_ms={_ms(seconds)} bytes_in={record.bytes_in} "
        f"bytes_out={record.bytes_out} id={record.request_id}{trace}{gone}{fault}"
    )


def _asked(record: RequestRecord) -> str | None:
    """Return what the client called the model, where that is another name than the line's."""
    return None if record.asked == record.model else record.asked


def _fault(text: str) -> str:
    return scrub(text if len(text) <= LONGEST_FAULT else f"{text[:LONGEST_FAULT]}…")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


class AccessLog:
    """Makes the lines and hands them on to the log's output."""

    def __init__(self, output: Output, *, as_json: bool) -> None:
        self._output = output
        self._line = json_line if as_json else text_line
        self._date, self._point, self._end = (utc, ".", "Z") if as_json else (local, ",", "")
        self._lines: list[str] = []
        self._second = 0
        self._shown = ""
        self._logger = logging.getLogger("access")
        if self._logger.level == logging.NOTSET:  # nobody has configured the log
            self._logger.setLevel(logging.INFO)

    def write(self, record: RequestRecord, seconds: float, *, quiet: bool = False) -> None:
        """Write a request's line within FLUSH_S; a quiet one is of the level debug."""
        if not self._logger.isEnabledFor(logging.DEBUG if quiet else logging.INFO):
            return
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._shown = self._date(second) + self._point
        if not self._lines:
            asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        stamp = f"{self._shown}{int((now - second) * 1000):03d}{self._end}"
        self._lines.append(self._line(record, seconds, stamp, "debug" if quiet else "info"))

    def flush(self) -> None:
        """Hand on what waits."""
        lines, self._lines = self._lines, []
        if lines:
            lines.append("")
            self._output.put("\n".join(lines), len(lines) - 1)
