"""The watchdog: samples in, a verdict out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.guard.process_tree import ProcessStat
from engines.process.watchdog import (
    FROZEN_S,
    GAP_S,
    SAMPLE_S,
    SILENT_S,
    Sample,
    Watchdog,
    counters,
    stopped,
)

PROGRESS_S = 60.0
FINE = Sample(at=0.0, stopped=(), health=200, waiting_s=0.0, counters=None)


def first_verdict(samples: list[Sample]) -> tuple[float, str] | None:
    """Return the time and the text of the first verdict."""
    monitor = Watchdog(PROGRESS_S)
    for sample in samples:
        if verdict := monitor.verdict(sample):
            return sample.at, verdict
    return None


def at_intervals(sample: Sample, count: int, waiting: float = 0.0) -> list[Sample]:
    """Repeat a sample; a waiting request has waited longer each time."""
    return [
        replace(sample, at=n * SAMPLE_S, waiting_s=waiting + n * SAMPLE_S if waiting else 0.0)
        for n in range(count)
    ]


def test_idle_engine_is_alive() -> None:
    assert first_verdict(at_intervals(FINE, 1000)) is None


def test_status_503_is_believed() -> None:
    found = first_verdict([FINE, replace(FINE, at=SAMPLE_S, health=503)])
    assert found is not None
    assert "answered 503" in found[1]


def test_stopped_process_is_dead_after_its_time() -> None:
    found = first_verdict(at_intervals(replace(FINE, stopped=(17,)), 10))
    assert found is not None
    assert found[0] == FROZEN_S
    assert "its process 17 has been stopped" in found[1]


def test_process_that_continues_in_time_is_alive() -> None:
    samples = at_intervals(FINE, 100)
    stop_and_go = [
        replace(sample, stopped=(17,) if n % 2 else ()) for n, sample in enumerate(samples)
    ]
    assert first_verdict(stop_and_go) is None


def test_silent_server_is_dead_after_its_time() -> None:
    found = first_verdict(at_intervals(replace(FINE, health=None), 30))
    assert found is not None
    assert found[0] == SILENT_S


def test_counters_that_move_during_a_long_prefill_are_progress() -> None:
    samples = [
        replace(sample, counters=n)
        for n, sample in enumerate(at_intervals(FINE, 100, waiting=SAMPLE_S))
    ]
    assert first_verdict(samples) is None


def test_waiting_requests_without_progress_fail_the_engine() -> None:
    found = first_verdict(at_intervals(replace(FINE, counters=5), 100, waiting=SAMPLE_S))
    assert found is not None
    assert found[0] == PROGRESS_S
    assert "progress_timeout_s" in found[1]


def test_idle_time_before_a_request_does_not_count() -> None:
    idle = at_intervals(replace(FINE, counters=5), 100)
    late = replace(FINE, at=100 * SAMPLE_S, waiting_s=SAMPLE_S, counters=5)
    assert first_verdict([*idle, late]) is None


def test_gap_between_samples_resets_the_evidence() -> None:
    before = at_intervals(replace(FINE, counters=5, health=None), 3, waiting=SAMPLE_S)
    after = replace(before[-1], at=before[-1].at + 10 * PROGRESS_S, waiting_s=10 * PROGRESS_S)
    assert after.at - before[-1].at > GAP_S
    assert first_verdict([*before, after]) is None


@given(st.lists(st.tuples(st.floats(0.1, GAP_S), st.booleans(), st.integers(0, 3))))
def test_verdict_needs_a_complete_period_of_silence(
    steps: list[tuple[float, bool, int]],
) -> None:
    monitor = Watchdog(PROGRESS_S)
    now = moved = 0.0
    waiting = 0.0
    known: int | None = None
    for gap, waits, counter in steps:
        now += gap
        waiting = waiting + gap if waits else 0.0
        if not waits or counter != known:
            moved, known = now, counter if waits else None
        verdict = monitor.verdict(Sample(now, (), 200, waiting, counter if waits else None))
        if verdict is not None:
            assert now - moved >= PROGRESS_S
            assert waiting >= PROGRESS_S
            return


EXPOSITION = b"""# HELP vllm:generation_tokens_total Number of generation tokens processed.
vllm:generation_tokens_total{engine="0",model_name="demo"} 17.0
vllm:generation_tokens_created{engine="0",model_name="demo"} 1.7e+09
process_cpu_seconds_total 4.0
http_requests_total{handler="/health"} 12.0
"""


@pytest.mark.parametrize(
    ("old", "new"), [(b"1.7e+09", b"1.8e+09"), (b"4.0", b"5.0"), (b" 12.0", b" 13.0")]
)
def test_other_series_are_no_progress(old: bytes, new: bytes) -> None:
    assert counters(EXPOSITION) == counters(EXPOSITION.replace(old, new))


def test_token_is_progress() -> None:
    assert counters(EXPOSITION) != counters(EXPOSITION.replace(b" 17.0", b" 18.0"))


def test_only_processes_stopped_by_a_signal_count() -> None:
    family = {pid: ProcessStat(state, 1, 1, 1) for pid, state in enumerate("RSDZTt")}
    assert stopped(family.items()) == (4,)
