"""The requests that ended last, each with its record and its timeline.

A bounded ring in memory, for the console and the admin API; it survives a reload and ends with the
gateway. Nothing of a prompt or an answer is kept. A request without a valid key is not kept either:
clients without one could push all others out.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from app.telemetry.request_record import NO_KEY, RequestRecord
from app.telemetry.request_timeline import NO_TIMELINE, RequestTimeline

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

    def end(self, record: RequestRecord, timeline: RequestTimeline) -> None:
        """Take the timeline of a request that has ended."""
        ...


class NoRecorder:
    """The recorder while neither the console nor traces are on."""

    def begin(
        self, method: str, headers: Iterable[tuple[bytes, bytes]], started: float
    ) -> RequestTimeline:
        return NO_TIMELINE

    def end(self, record: RequestRecord, timeline: RequestTimeline) -> None:
        pass


NO_RECORDER = NoRecorder()


class RecentRequests:
    """A `RequestRecorder` that keeps the last requests; iterates over them, the latest first."""

    def __init__(self, kept: int = MAX_KEPT) -> None:
        self._ended: deque[tuple[RequestRecord, RequestTimeline]] = deque(maxlen=kept)

    def begin(
        self, method: str, headers: Iterable[tuple[bytes, bytes]], started: float
    ) -> RequestTimeline:
        return RequestTimeline(started)

    def end(self, record: RequestRecord, timeline: RequestTimeline) -> None:
        if record.fault is not None:
            record = _bounded(record, record.fault)
        if record.key_id != NO_KEY:
            self._ended.append((record, timeline))

    def __iter__(self) -> Iterator[tuple[RequestRecord, RequestTimeline]]:
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

    def end(self, record: RequestRecord, timeline: RequestTimeline) -> None:
        self._tracer.end(record, timeline)
        super().end(record, timeline)


def _bounded(record: RequestRecord, fault: str) -> RequestRecord:
    """Return a record whose fault has a bounded length."""
    if len(fault) <= MAX_FAULT_CHARS:
        return record
    return msgspec.structs.replace(record, fault=f"{fault[:MAX_FAULT_CHARS]}…")
