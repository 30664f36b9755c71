"""The access log: one line per request, with any outcome, without control characters and secrets.

It bypasses the logging module, which took 45 µs for a line, of 190 for the whole request; the level
of the logger `access` still applies. Lines are batched for up to FLUSH_S, so that a busy gateway
wakes the log writer ten times a second; a SIGKILL loses that batch.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from logging import DEBUG, INFO

import msgspec

from app.telemetry.logs.formatter import local, utc
from app.telemetry.logs.refusals import STATUSES, RefusalCounts
from app.telemetry.logs.scrub import clean, scrub
from app.telemetry.logs.writer import Output
from app.telemetry.request_record import NO_KEY, UNKNOWN_MODEL, RequestRecord

FLUSH_S = 0.1
# Lines that are formatted at a time, in a fraction of a millisecond.
LINES_AT_ONCE = 64
# Interval of the counts of refused requests that have no line of their own.
COUNTS_S = 10.0
# Limit of an error text, which may quote a client.
MAX_FAULT_CHARS = 300
# Not what has the prefix of a key in it; `task-1` has none.
_CLIENT_ID = re.compile(rb"(?!(.*[._-])?sk-)[A-Za-z0-9._-]{1,128}")
# IDs must be unique and need not be secret, so no system call is spent on one.
_random = random.Random()  # noqa: S311


def new_id() -> str:
    """Return a new request ID."""
    return f"{_random.getrandbits(128):032x}"


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's x-request-id if it is harmless, else a new ID.

    It is logged, stored and sent to engines, so the request's own key is none.
    """
    found, keys = b"", set()
    for name, value in headers:
        if name == b"x-request-id" and not found and _CLIENT_ID.fullmatch(value):
            found = value
        elif name in (b"authorization", b"x-api-key"):
            keys.add(value.rpartition(b" ")[2])
    return found.decode() if found and found not in keys else new_id()


_encode = msgspec.json.Encoder().encode


@lru_cache(maxsize=1024)  # keys, models and engines are few
def _quote(name: str) -> str:
    return _encode(clean(name)).decode()


@lru_cache(maxsize=1024)
def _format_names(key: str, model: str, engine: str | None, method: str, endpoint: str) -> str:
    return (
        f'"key":{"null" if key == "-" else _quote(key)},"model":{_quote(model)},'
        f'"engine":{"null" if engine is None else _quote(engine)},'
        f'"method":"{method}","endpoint":{_quote(endpoint)}'
    )


_JSON_LINE = (
    '{"time":"%s","level":"%s","logger":"access","event":"request","request_id":"%s",%s,'
    '"status":%d,"prompt_tokens":%s,"cached_tokens":%s,"completion_tokens":%s,"estimated":%s,'
    '"queue_ms":%s,"ttft_ms":%s,"total_ms":%.1f,"bytes_in":%d,"bytes_out":%d,"client_gone":%s%s}'
)


def json_line(record: RequestRecord, stamp: str, level: str) -> str:
    """Return the access line as JSON, with the field names of all log lines.

    Formatted by hand: an encoder takes twice as long, and only names and faults need one.
    """
    usage, queued_s, ttft_s = record.usage, record.queued_s, record.ttft_s
    names = _format_names(
        record.key_id, record.model, record.engine, record.method, record.endpoint
    )
    return _JSON_LINE % (
        stamp,
        level,
        record.request_id,
        names,
        record.status,
        "null" if usage is None else usage.prompt,
        "null" if usage is None else usage.cached,
        "null" if usage is None else usage.completion,
        "true" if usage is not None and usage.estimated else "false",
        "null" if queued_s is None else _format_ms(queued_s),
        "null" if ttft_s is None else _format_ms(ttft_s),
        record.total_s * 1000,
        record.bytes_in,
        record.bytes_out,
        "true" if record.client_gone else "false",
        _unusual(record),
    )


def _unusual(record: RequestRecord) -> str:
    """Return the fields that most lines do not have, as members of JSON."""
    more = ""
    if record.requested_model != record.model and record.requested_model:
        more = f',"asked":{_quote(record.requested_model)}'
    if record.fault:
        more += f',"fault":{_encode(_format_fault(record.fault)).decode()}'
    if record.trace_id:
        more += f',"trace_id":"{record.trace_id}"'
    if record.continued or record.recomputed_tokens or record.not_continued:
        for name, value in _continuation(record):
            more += f',"{name}":{_encode(value).decode()}'
    return more


def text_line(record: RequestRecord, stamp: str, level: str) -> str:
    """Return the access line as text; unknown values are left out.

    Estimated token counts are marked with ~.
    """
    model = f" model={clean(record.model)}" if record.model != UNKNOWN_MODEL else ""
    asked = f" asked={clean(name)}" if (name := _requested_name(record)) else ""
    engine = f" engine={clean(record.engine)}" if record.engine else ""
    key = f" key={record.key_id}" if record.key_id != "-" else ""
    tokens = ""
    if (usage := record.usage) is not None:
        cached = f" cached={usage.cached}" if usage.cached else ""
        tokens = (
            f" tokens={'~' if usage.estimated else ''}{usage.prompt}+{usage.completion}{cached}"
        )
    queued = f" queue_ms={_format_ms(record.queued_s)}" if record.queued_s is not None else ""
    first = f" ttft_ms={_format_ms(record.ttft_s)}" if record.ttft_s is not None else ""
    trace = f" trace={record.trace_id}" if record.trace_id else ""
    gone = " client=gone" if record.client_gone else ""
    continued = "".join(f" {name}={value}" for name, value in _continuation(record))
    fault = f" fault={_format_fault(record.fault)!r}" if record.fault else ""
    return (
        f"{stamp} {level.upper():<7} access: {record.status} {record.method} {record.endpoint}"
        f"{model}{asked}{engine}{key}{tokens}{queued}{first} total_ms={_format_ms(record.total_s)} "
        f"bytes_in={record.bytes_in} bytes_out={record.bytes_out} id={record.request_id}"
        f"{trace}{continued}{gone}{fault}"
    )


def _continuation(record: RequestRecord) -> Sequence[tuple[str, int | str]]:
    """Return the names and values of the fields that only an interrupted stream has."""
    fields: tuple[tuple[str, int | str | None], ...] = (
        ("continued", record.continued),
        ("recomputed_tokens", record.recomputed_tokens),
        ("not_continued", record.not_continued),
    )
    return [(name, value) for name, value in fields if value]


def _requested_name(record: RequestRecord) -> str | None:
    """Return the model name that the client sent if it differs from the line's model."""
    return None if record.requested_model == record.model else record.requested_model


def _format_fault(text: str) -> str:
    return scrub(text if len(text) <= MAX_FAULT_CHARS else f"{text[:MAX_FAULT_CHARS]}…")


def _format_ms(seconds: float | None) -> str:
    return "null" if seconds is None else f"{seconds * 1000:.1f}"


# Formatting a number takes a tenth of the time of a line.
_THOUSANDTHS = tuple(f"{number:03d}" for number in range(1000))


class AccessLog:
    """Formats the lines and passes them to the log's output in batches."""

    def __init__(self, output: Output, *, as_json: bool) -> None:
        self._output = output
        self._format = json_line if as_json else text_line
        self._format_date, self._point, self._end = (utc, ".", "Z") if as_json else (local, ",", "")
        # Records without a line yet, each with its time and whether it is quiet. Formatting them
        # together takes less time, and none of the requests themselves.
        self._waiting: list[tuple[RequestRecord, float, bool]] = []
        self._lines: list[str] = []
        self._flush_due = False
        self._refusals = RefusalCounts()
        self._counting: asyncio.TimerHandle | None = None
        self._logger = logging.getLogger("access")
        if self._logger.level == logging.NOTSET:  # the log is not configured
            self._logger.setLevel(logging.INFO)

    def write(self, record: RequestRecord, *, quiet: bool = False, peer: str = "") -> None:
        """Write a request's line within FLUSH_S; a quiet request has the level debug.

        `peer` is the client's address. Refusals beyond LINES_PER_S of a client are only counted.
        """
        now = time.time()
        if (
            record.engine is None
            and record.status in STATUSES
            and not self._admit(record, peer, now)
        ):
            return
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        self._waiting.append((record, now, quiet))
        if len(self._waiting) >= LINES_AT_ONCE:
            self._format_lines()

    def _admit(self, record: RequestRecord, peer: str, now: float) -> bool:
        """Return whether a refusal gets a line; else count it."""
        client = peer if record.key_id == NO_KEY else record.key_id
        if self._refusals.admit(client, record.status, int(now)):
            return True
        if self._counting is None:
            self._counting = asyncio.get_running_loop().call_later(COUNTS_S, self._log_counts)
        return False

    def _log_counts(self) -> None:
        self._counting = None
        for client, status, number in self._refusals.take():
            text = "%d more requests of %s refused with status %d, without a line each"
            self._logger.info(text, number, client or "an unknown address", status)

    def _format_lines(self) -> None:
        waiting, self._waiting = self._waiting, []
        info, debug = self._logger.isEnabledFor(INFO), self._logger.isEnabledFor(DEBUG)
        known, prefix = -1, ""
        for record, now, quiet in waiting:
            if debug or (info and not quiet):
                second = int(now)
                if second != known:
                    known, prefix = second, self._format_date(second) + self._point
                stamp = prefix + _THOUSANDTHS[int((now - second) * 1000)] + self._end
                self._lines.append(self._format(record, stamp, "debug" if quiet else "info"))

    def flush(self) -> None:
        """Pass the batch to the output."""
        self._flush_due = False
        self._format_lines()
        lines, self._lines = self._lines, []
        if lines:
            lines.append("")
            self._output.put("\n".join(lines), len(lines) - 1)
