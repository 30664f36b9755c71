"""The ring of requests that ended last."""

import gc
from collections.abc import Iterable

from app.telemetry import (
    NO_TIMELINE,
    RecentRequests,
    RequestRecord,
    RequestTimeline,
    TracedRequests,
)
from app.telemetry.recent_requests import MAX_FAULT_CHARS, NO_RECORDER


def ended(number: int, key: str = "key-1", fault: str | None = None) -> RequestRecord:
    return RequestRecord(
        f"request-{number}", "/v1/chat/completions", "POST", 200, 0.1, key_id=key, fault=fault
    )


def names(ring: RecentRequests) -> list[str]:
    return [record.request_id for record, _ in ring]


def test_ring_keeps_the_last_requests_and_shows_the_latest_first() -> None:
    ring = RecentRequests(kept=3)
    for number in range(5):
        ring.end(ended(number), ring.begin("POST", [], 1.0))
    assert names(ring) == ["request-4", "request-3", "request-2"]


def test_request_without_a_key_pushes_none_out() -> None:
    ring = RecentRequests(kept=1)
    ring.end(ended(1), ring.begin("POST", [], 1.0))
    ring.end(ended(2, key="-"), ring.begin("POST", [], 1.0))
    assert names(ring) == ["request-1"]


def test_long_fault_is_cut() -> None:
    ring = RecentRequests()
    ring.end(ended(1, fault="x" * 10_000), ring.begin("POST", [], 1.0))
    [(record, _)] = ring
    assert record.fault == "x" * MAX_FAULT_CHARS + "…"


def test_traces_get_the_same_timelines() -> None:
    class Traces:
        def __init__(self) -> None:
            self.ended: list[RequestTimeline] = []

        def begin(
            self, method: str, headers: Iterable[tuple[bytes, bytes]], started: float
        ) -> RequestTimeline:
            return RequestTimeline(started, sampled_id="0af7")

        def end(self, record: RequestRecord, timeline: RequestTimeline) -> None:
            self.ended.append(timeline)

    traces = Traces()
    ring = TracedRequests(traces)
    timeline = ring.begin("POST", [], 1.0)
    assert timeline.sampled_id == "0af7"
    ring.end(ended(1, key="-"), timeline)
    assert traces.ended == [timeline]


def test_garbage_collection_does_not_follow_what_is_kept() -> None:
    ring = RecentRequests()
    timeline = ring.begin("POST", [], 1.0)
    timeline.begin("queue")
    ring.end(ended(1), timeline)
    [(record, kept)] = ring
    assert not any(gc.is_tracked(one) for one in (record, kept, kept.last))


def test_requests_are_not_timed_where_nothing_reads_it() -> None:
    assert NO_RECORDER.begin("POST", [], 1.0) is NO_TIMELINE
    NO_RECORDER.end(ended(1), NO_TIMELINE)
