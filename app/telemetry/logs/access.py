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
from functools import lru_cache

import msgspec

from app.telemetry.logs.scrub import clean, scrub
from app.telemetry.logs.timestamps import local, utc
from app.telemetry.logs.writer import Output
from app.telemetry.request_record import UNKNOWN_MODEL, RequestRecord

FLUSH_S = 0.1
# What is told of a fault, which may quote a client.
LONGEST_FAULT = 300
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
# Ids must differ and need not be secret, so no system call is spent on one.
_random = random.Random()  # noqa: S311


def new_id() -> str:
    """Return an id for a request."""
    return _random.randbytes(16).hex()


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's x-request-id where it is harmless, a new one otherwise."""
    for name, value in headers:
        if name == b"x-request-id" and _CLIENT_ID.fullmatch(value):
            return value.decode()
    return new_id()


_encode = msgspec.json.Encoder().encode


@lru_cache(maxsize=1024)  # of keys, models and engines there are few
def _quoted(name: str) -> str:
    return _encode(clean(name)).decode()


@lru_cache(maxsize=1024)
def _who_and_where(key: str, model: str, engine: str | None, method: str, endpoint: str) -> str:
    return (
        f'"key":{"null" if key == "-" else _quoted(key)},"model":{_quoted(model)},'
        f'"engine":{"null" if engine is None else _quoted(engine)},'
        f'"method":"{method}","endpoint":{_quoted(endpoint)}'
    )


def json_line(record: RequestRecord, stamp: str, level: str) -> str:
    """Return the access line as JSON, in the names of all lines; `logs.py` has the others.

    Put together by hand: an encoder takes twice as long, and only names and faults need one.
    """
    used = record.usage
    if used is None:
        tokens = '"prompt_tokens":null,"cached_tokens":null,"completion_tokens":null'
        estimated = "false"
    else:
        tokens = (
            f'"prompt_tokens":{used.prompt},"cached_tokens":{used.cached},'
            f'"completion_tokens":{used.completion}'
        )
        estimated = "true" if used.estimated else "false"
    names = _who_and_where(
        record.key_id, record.model, record.engine, record.method, record.endpoint
    )
    more = ""
    if asked := _asked(record):
        more = f',"asked":{_quoted(asked)}'
    if record.fault:
        more += f',"fault":{_encode(_fault(record.fault)).decode()}'
    if record.trace_id:
        more += f',"trace_id":"{record.trace_id}"'
    return (
        f'{{"time":"{stamp}","level":"{level}","logger":"access","event":"request",'
        f'"request_id":"{record.request_id}",{names},"status":{record.status},{tokens},"estimated":{estimated},'
        f'"queue_ms":{_number(record.queued_s)},"ttft_ms":{_number(record.ttft_s)},'
        f'"total_ms":{record.total_s * 1000:.1f},"bytes_in":{record.bytes_in},'
        f'"bytes_out":{record.bytes_out},'
        f'"client_gone":{"true" if record.client_gone else "false"}{more}}}'
    )


def _number(seconds: float | None) -> str:
    return "null" if seconds is None else f"{seconds * 1000:.1f}"


def text_line(record: RequestRecord, stamp: str, level: str) -> str:
    """Return the access line for people: what is not known of a request is left out.

    An estimated number of tokens has a ~ before it.
    """
    model = f" model={clean(record.model)}" if record.model != UNKNOWN_MODEL else ""
    asked = f" asked={clean(name)}" if (name := _asked(record)) else ""
    engine = f" engine={clean(record.engine)}" if record.engine else ""
    key = f" key={record.key_id}" if record.key_id != "-" else ""
    tokens = ""
    if (used := record.usage) is not None:
        cached = f" cached={used.cached}" if used.cached else ""
        tokens = f" tokens={'~' if used.estimated else ''}{used.prompt}+{used.completion}{cached}"
    queued = f" queue_ms={_ms(record.queued_s)}" if record.queued_s is not None else ""
    first = f" ttft_ms={_ms(record.ttft_s)}" if record.ttft_s is not None else ""
    trace = f" trace={record.trace_id}" if record.trace_id else ""
    gone = " client=gone" if record.client_gone else ""
    fault = f" fault={_fault(record.fault)!r}" if record.fault else ""
    return (
        f"{stamp} {level.upper():<7} access: {record.status} {record.method} {record.endpoint}"
        f"{model}{asked}{engine}{key}{tokens}{queued}{first} total_ms={_ms(record.total_s)} "
        f"bytes_in={record.bytes_in} bytes_out={record.bytes_out} id={record.request_id}"
        f"{trace}{gone}{fault}"
    )


def _asked(record: RequestRecord) -> str | None:
    """Return what the client called the model, where that is another name than the line's."""
    return None if record.requested_model == record.model else record.requested_model


def _fault(text: str) -> str:
    return scrub(text if len(text) <= LONGEST_FAULT else f"{text[:LONGEST_FAULT]}…")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"


# To format one takes as long as a tenth of a line.
_THOUSANDTHS = tuple(f"{number:03d}" for number in range(1000))


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

    def write(self, record: RequestRecord, *, quiet: bool = False) -> None:
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
        stamp = self._shown + _THOUSANDTHS[int((now - second) * 1000)] + self._end
        self._lines.append(self._line(record, stamp, "debug" if quiet else "info"))

    def flush(self) -> None:
        """Hand on what waits."""
        lines, self._lines = self._lines, []
        if lines:
            lines.append("")
            self._output.put("\n".join(lines), len(lines) - 1)
