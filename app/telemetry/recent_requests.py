"""The requests that ended last, of which the ledger stores those that reached an engine.

A bounded ring in memory, for the console and the admin API; it survives a reload and ends with the
gateway. Nothing of a prompt or an answer is kept. A request without a valid key is not kept either:
clients without one could push all others out.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from app.telemetry.ended_request import EndedRequest
from app.telemetry.request_record import NO_KEY
from app.telemetry.request_timeline import RequestTimeline

# About 2 KiB each.
MAX_KEPT = 4096
# An error text may quote a client.
MAX_FAULT_CHARS = 300


class RequestRecorder(Protocol):
    """Gives each request its timeline, and takes it back when the request has ended."""

    def begin(
        self, method: str, headers: Iterable[tuple[bytes, bytes]], started: float
    ) -> RequestTimeline:
        """Return the timeline of a request that began at `started` (perf_counter)."""
        ...

    def end(self, ended: EndedRequest) -> None:
        """Take a request that has ended, with the timeline of `begin`."""
        ...


class RecentRequests:
    """A `RequestRecorder` that keeps the last requests; iterates over them, the latest first."""

    def __init__(self, kept: int = MAX_KEPT) -> None:
        self._ended: deque[EndedRequest] = deque(maxlen=kept)

    def begin(
        self, method: str, headers: Iterable[tuple[bytes, bytes]], started: float
    ) -> RequestTimeline:
        return RequestTimeline(started)

    def end(self, ended: EndedRequest) -> None:
        if ended.record.key_id == NO_KEY:
            return
        if ended.record.fault is not None:
            ended = _bounded(ended, ended.record.fault)
        self._ended.append(ended)

    def __iter__(self) -> Iterator[EndedRequest]:
        return reversed(self._ended)


class TracedRequests(RecentRequests):
    """The same where traces are on: their timelines are kept, and spans are made from them too."""

    def __init__(self, tracer: RequestRecorder, kept: int = MAX_KEPT) -> None:
        super().__init__(kept)
        self._tracer = tracer

    def begin(
        self, method: str, headers: Iterable[tuple[bytes, bytes]], started: float
    ) -> RequestTimeline:
        return self._tracer.begin(method, headers, started)

    def end(self, ended: EndedRequest) -> None:
        self._tracer.end(ended)
        super().end(ended)


def _bounded(ended: EndedRequest, fault: str) -> EndedRequest:
    """Return a request whose fault has a bounded length."""
    if len(fault) <= MAX_FAULT_CHARS:
        return ended
    record = msgspec.structs.replace(ended.record, fault=f"{fault[:MAX_FAULT_CHARS]}…")
    return msgspec.structs.replace(ended, record=record)
