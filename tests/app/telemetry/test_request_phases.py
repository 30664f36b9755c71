"""The phases of a request: one bar from arrival to last byte, without gaps."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.telemetry import RequestRecord, RequestTimeline, request_phases
from engines.base import EngineDied, EngineNotReady

Moments = dict[str, float]


class Clock:
    """What a timeline takes for perf_counter."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("app.telemetry.request_timeline.perf_counter", clock)
    return clock


def record(total_s: float, **facts: Any) -> RequestRecord:
    return RequestRecord("abc", "/v1/chat/completions", "POST", 200, total_s, **facts)


def shown(ended: RequestRecord, timeline: RequestTimeline) -> list[tuple[str, float, float, str]]:
    """Return the phases, in hundredths of a second."""
    phases = request_phases(ended, timeline)
    return [
        (phase.name, round(phase.start_s * 100), round(phase.end_s * 100), phase.note)
        for phase in phases
    ]


def admitted(clock: Clock) -> RequestTimeline:
    """Return the timeline of a request whose limits are checked, from 0.02 s on."""
    timeline = RequestTimeline(clock.now)
    clock.now = 100.01
    timeline.note_authenticated()
    timeline.limits_began = 100.02
    return timeline


BEFORE = [("auth", 0, 1, ""), ("body", 1, 2, "")]


def test_plain_request(clock: Clock) -> None:
    timeline = admitted(clock)
    clock.now = 100.03
    timeline.begin_attempt("demo-0")
    clock.now = 100.5
    timeline.answered(200)
    assert shown(record(0.51), timeline) == [
        *BEFORE, ("limits", 2, 3, ""), ("generate", 3, 51, "demo-0"),
    ]  # fmt: skip


def test_stream_that_waited_for_load_and_queue_and_for_its_client(clock: Clock) -> None:
    timeline = admitted(clock)
    clock.now = 100.03
    timeline.begin("load_wait")
    clock.now = 100.13
    timeline.end(waited=True)
    timeline.begin("queue", 7)
    clock.now = 100.33
    timeline.end(waited=True)
    clock.now = 100.34
    timeline.begin_attempt("demo-1")
    timeline.answered(200)
    assert shown(record(1.0, ttft_s=0.5, client_wait_s=0.2), timeline) == [
        *BEFORE, ("limits", 2, 3, ""), ("load_wait", 3, 13, ""), ("queue", 13, 34, "position 7"),
        ("prefill", 34, 50, "demo-1"), ("decode", 50, 80, "demo-1"), ("client_wait", 80, 100, ""),
    ]  # fmt: skip


def test_wait_that_was_none_is_no_phase(clock: Clock) -> None:
    timeline = admitted(clock)
    timeline.begin("load_wait")
    timeline.end(waited=False)
    clock.now = 100.04
    timeline.begin_attempt("demo-0")
    assert [name for name, *_ in shown(record(0.1), timeline)] == [
        "auth", "body", "limits", "generate",
    ]  # fmt: skip


def test_failed_attempts_and_a_fallback(clock: Clock) -> None:
    timeline = admitted(clock)
    clock.now = 100.03
    timeline.begin_attempt("demo-0")
    clock.now = 100.04
    timeline.begin_attempt("demo-1", EngineNotReady("gone"))
    clock.now = 100.05
    timeline.failed("demo", "engine_unavailable")
    clock.now = 100.06
    timeline.begin_attempt("small-0")
    assert shown(record(0.2), timeline)[2:] == [
        ("limits", 2, 3, ""), ("attempt", 3, 4, "demo-0, failed: EngineUnavailable"),
        ("attempt", 4, 6, "demo-1, failed: engine_unavailable"), ("generate", 6, 20, "small-0"),
    ]  # fmt: skip


def test_model_without_an_engine_fails_where_it_is(clock: Clock) -> None:
    timeline = admitted(clock)
    clock.now = 100.03
    timeline.failed("demo", "engine_unavailable")
    clock.now = 100.04
    timeline.begin_attempt("small-0")
    assert shown(record(0.2), timeline)[2:] == [
        ("limits", 2, 4, "failed: engine_unavailable"), ("generate", 4, 20, "small-0"),
    ]  # fmt: skip


def test_interrupted_stream(clock: Clock) -> None:
    timeline = admitted(clock)
    clock.now = 100.03
    timeline.begin_attempt("demo-0")
    clock.now = 100.3
    timeline.interrupted(EngineDied("killed"))
    clock.now = 100.4
    timeline.begin_attempt("demo-1", EngineDied("killed"))
    clock.now = 100.5
    timeline.resumed()
    assert shown(record(1.0, ttft_s=0.1), timeline)[3:] == [
        ("prefill", 3, 10, "demo-0"), ("decode", 10, 30, "demo-0, failed: EngineDied"),
        ("continuation", 30, 40, ""), ("continuation", 40, 50, "demo-1"),
        ("decode", 50, 100, "demo-1"),
    ]  # fmt: skip


def test_request_that_is_refused_at_its_key() -> None:
    assert shown(record(0.5), RequestTimeline(100.0)) == [("auth", 0, 50, "")]


NOTES = ("authenticated", "limits", "load_wait", "queue", "end", "none", "attempt", "fault",
         "answered", "stream", "failed", "interrupted", "resumed")  # fmt: skip


def note(timeline: RequestTimeline, kind: str, now: float) -> None:
    """Note something as the relay does, where it can happen."""
    waits = timeline.engine is None and timeline.last is not None and timeline.last.engine is None
    match kind:
        case "authenticated":
            timeline.note_authenticated()
        case "limits":
            timeline.limits_began = now
        case "load_wait" | "queue":
            timeline.begin(kind)
        case "end" | "none" if waits:
            timeline.end(waited=kind == "end")
        case "attempt":
            timeline.begin_attempt("demo-0")
        case "fault":
            timeline.begin_attempt("demo-1", EngineDied("killed"))
        case "answered":
            timeline.answered(200)
        case "failed":
            timeline.failed("demo", "engine_failed")
        case "interrupted":
            timeline.interrupted(EngineDied("killed"))
        case "stream":
            timeline.begin_stream()
        case "resumed":
            timeline.resumed()


@given(
    notes=st.lists(st.tuples(st.sampled_from(NOTES), st.floats(0, 10)), max_size=20),
    rest_s=st.floats(0, 10),
    first=st.none() | st.floats(0, 200),
    client_wait_s=st.floats(0, 50),
    early_s=st.floats(0, 20),
)
def test_phases_leave_no_gap_and_do_not_overlap(
    notes: list[tuple[str, float]],
    rest_s: float,
    first: float | None,
    client_wait_s: float,
    early_s: float,
) -> None:
    """Whatever happened, and also for a request that is looked at before its last step."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.telemetry.request_timeline.perf_counter", clock)
        timeline = RequestTimeline(clock.now)
        for kind, seconds in notes:
            clock.now += seconds
            note(timeline, kind, clock.now)
    total_s = max(clock.now + rest_s - 100.0 - early_s, 0.0)
    ended = record(total_s, ttft_s=first, client_wait_s=client_wait_s)
    phases = request_phases(ended, timeline)
    if total_s == 0:
        assert phases == []
        return
    assert phases[0].start_s == 0
    assert phases[-1].end_s == total_s
    assert all(phase.start_s < phase.end_s for phase in phases)
    assert all(one.end_s == other.start_s for one, other in pairwise(phases))
    if client_wait_s > 1e-9:
        assert phases[-1].name == "client_wait"
    without = msgspec.structs.replace(ended, client_wait_s=0.0)
    assert all(phase.name != "client_wait" for phase in request_phases(without, timeline))
