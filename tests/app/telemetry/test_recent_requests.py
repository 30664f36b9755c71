"""The ring of requests that ended last."""

import gc
from collections.abc import Iterable

from app.telemetry import (
    EndedRequest,
    RecentRequests,
    RequestRecord,
    RequestTimeline,
    TracedRequests,
)
from app.telemetry.recent_requests import MAX_FAULT_CHARS


def ended(
    number: int, timeline: RequestTimeline, key: str = "key-1", fault: str | None = None
) -> EndedRequest:
    record = RequestRecord(
        f"request-{number}", "/v1/chat/completions", "POST", 200, 0.1, key_id=key, fault=fault
    )
    return EndedRequest(record, timeline, 1.0, "01234567")


def names(ring: RecentRequests) -> list[str]:
    return [one.record.request_id for one in ring]


def test_ring_keeps_the_last_requests_and_shows_the_latest_first() -> None:
    ring = RecentRequests(kept=3)
    for number in range(5):
        ring.end(ended(number, ring.begin("POST", [], 1.0)))
    assert names(ring) == ["request-4", "request-3", "request-2"]


def test_request_without_a_key_pushes_none_out() -> None:
    ring = RecentRequests(kept=1)
    ring.end(ended(1, ring.begin("POST", [], 1.0)))
    ring.end(ended(2, ring.begin("POST", [], 1.0), key="-"))
    assert names(ring) == ["request-1"]


def test_long_fault_is_cut() -> None:
    ring = RecentRequests()
    ring.end(ended(1, ring.begin("POST", [], 1.0), fault="x" * 10_000))
    [kept] = ring
    assert kept.record.fault == "x" * MAX_FAULT_CHARS + "…"


def test_traces_get_the_same_timelines() -> None:
    class Traces:
        def __init__(self) -> None:
            self.ended: list[RequestTimeline] = []

        def begin(
            self, method: str, headers: Iterable[tuple[bytes, bytes]], started: float
        ) -> RequestTimeline:
            return RequestTimeline(started, sampled_id="0af7")

        def end(self, ended: EndedRequest) -> None:
            self.ended.append(ended.timeline)

    traces = Traces()
    ring = TracedRequests(traces)
    timeline = ring.begin("POST", [], 1.0)
    assert timeline.sampled_id == "0af7"
    ring.end(ended(1, timeline, key="-"))
    assert traces.ended == [timeline]


def test_garbage_collection_does_not_follow_what_is_kept() -> None:
    ring = RecentRequests()
    timeline = ring.begin("POST", [], 1.0)
    timeline.begin("queue")
    ring.end(ended(1, timeline))
    [kept] = ring
    tracked = (kept, kept.record, kept.timeline, kept.timeline.last)
    assert not any(gc.is_tracked(one) for one in tracked)
