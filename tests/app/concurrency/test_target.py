"""The target of an engine: how it moves, and what it leads to on a simulated engine."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.concurrency import ConcurrencyTarget, EngineCounters, initial_target
from app.concurrency.target import GROW_AFTER_S, MAX_TARGET, SETTLE_S
from tests.app.concurrency.simulated_engine import SimulatedEngine

CALM = EngineCounters(running=8, waiting=0, preemptions=0, ended=0, kv_usage=0.1)
CROWDED = EngineCounters(running=100, waiting=60, preemptions=0, ended=0, kv_usage=0.6)


def at_each_look(counters: EngineCounters) -> Iterator[EngineCounters]:
    """Yield the counters of an engine whose load stays as it is, while the cache fills."""
    while True:
        counters = replace(counters, kv_usage=counters.kv_usage + 1e-9)
        yield counters


@pytest.mark.parametrize(
    ("max_concurrency", "first"), [(None, 8), (1.37, 8), (20.9, 20), (5000.0, 64)]
)
def test_first_target_follows_the_kv_cache(max_concurrency: float | None, first: int) -> None:
    assert initial_target(max_concurrency) == first


def test_doubles_while_requests_wait_here_and_none_waits_there() -> None:
    target = ConcurrencyTarget(8)
    calm = at_each_look(CALM)
    assert [target.update(n, next(calm), queued=True) for n in range(3)] == [16, 32, 64]
    assert target.update(3, next(calm), queued=False) == 64, "none waits for more"


def test_grows_by_a_sixteenth_once_half_of_the_cache_is_used_and_not_when_it_is_full() -> None:
    target = ConcurrencyTarget(64)
    half = at_each_look(EngineCounters(running=64, waiting=0, preemptions=0, ended=0, kv_usage=0.5))
    assert [target.update(n, next(half), queued=True) for n in range(3)] == [68, 72, 76]
    full = EngineCounters(running=76, waiting=0, preemptions=0, ended=0, kv_usage=0.9)
    assert target.update(3, full, queued=True) == 76


def test_what_waits_there_at_two_looks_is_taken_off() -> None:
    target, crowded = ConcurrencyTarget(160), at_each_look(CROWDED)
    assert target.update(0, next(crowded), queued=True) == 160, "arrivals wait for the next step"
    assert target.update(1, next(crowded), queued=True) == 110
    for n in (2, 3):
        assert target.update(n, next(crowded), queued=True) == 110, "those too many end first"
    assert target.update(1 + SETTLE_S, next(crowded), queued=True) == 110
    assert target.update(2 + SETTLE_S, next(crowded), queued=True) == 56, (
        "a second time, others' load"
    )


def test_a_target_above_what_is_there_falls_at_once_to_what_the_engine_runs() -> None:
    """Of vLLM 0.32 with max-num-seqs 12, under a target of the search."""
    target = ConcurrencyTarget(122)
    there = at_each_look(
        EngineCounters(running=12, waiting=20, preemptions=0, ended=0, kv_usage=0.01)
    )
    assert [target.update(n, next(there), queued=False) for n in range(2)] == [122, 16]


def test_a_few_that_wait_fill_places_at_once() -> None:
    target = ConcurrencyTarget(64)
    few = at_each_look(EngineCounters(running=60, waiting=4, preemptions=0, ended=0, kv_usage=0.6))
    assert [target.update(n, next(few), queued=False) for n in range(9)] == [64] * 9


def test_as_many_may_wait_as_end_in_a_tenth_of_a_second() -> None:
    """Short answers leave so many places that a batch with only a sixteenth behind it has gaps."""
    target, ended = ConcurrencyTarget(64), 0
    for n in range(9):
        there = EngineCounters(running=50, waiting=14, preemptions=0, ended=ended, kv_usage=0.6)
        assert target.update(n, there, queued=False) == 64
        ended += 140
    there = EngineCounters(running=50, waiting=14, preemptions=0, ended=ended - 139, kv_usage=0.6)
    assert target.update(9, there, queued=False) == 64
    there = replace(there, ended=ended - 100)
    assert target.update(10, there, queued=False) == 54, "39 end in a second, and 4 of 14 may wait"


def test_preemption_lowers_it_at_once_and_stops_growth_for_a_while() -> None:
    target = ConcurrencyTarget(100)
    target.update(0, EngineCounters(90, 0, 7, 0, 0.8), queued=False)
    assert target.update(1, EngineCounters(80, 1, 9, 0, 0.99), queued=True) == 72  # 90 % of 81
    calm = at_each_look(EngineCounters(60, 0, 9, 0, 0.7))
    assert target.update(1 + SETTLE_S, next(calm), queued=True) == 72
    assert target.update(1 + GROW_AFTER_S, next(calm), queued=True) == 76


def test_preemption_of_requests_that_have_ended_takes_at_most_half() -> None:
    target = ConcurrencyTarget(100)
    target.update(0, EngineCounters(90, 0, 7, 0, 0.8), queued=False)
    assert target.update(1, EngineCounters(0, 0, 8, 0, 0.0), queued=False) == 50


def test_an_engine_that_began_anew_has_preempted_nothing() -> None:
    target = ConcurrencyTarget(64)
    target.update(0, EngineCounters(8, 0, 1_000, 0, 0.1), queued=False)
    assert target.update(1, EngineCounters(8, 0, 3, 0, 0.1), queued=False) == 64


@pytest.mark.parametrize("counters", [CALM, CROWDED])
def test_frozen_counters_leave_it_as_it_is(counters: EngineCounters) -> None:
    target = ConcurrencyTarget(16)
    first = target.update(0, counters, queued=True)
    assert {target.update(n, counters, queued=True) for n in range(1, 3600)} == {first}


def test_counters_that_lie_lead_no_further_than_the_bounds_and_true_ones_lead_back() -> None:
    target, calm, crowded = ConcurrencyTarget(8), at_each_look(CALM), at_each_look(CROWDED)
    assert max(target.update(n, next(calm), queued=True) for n in range(3600)) == MAX_TARGET
    for look in range(3600, 7200):
        target.update(look, next(crowded), queued=True)
    assert target.value == 1
    assert target.update(7200, next(calm), queued=True) == 2


COUNTERS = st.builds(
    EngineCounters,
    running=st.integers(0, 10**15),
    waiting=st.integers(0, 10**15),
    preemptions=st.integers(0, 10**15),
    ended=st.integers(0, 10**15),
    kv_usage=st.floats(0, 1e15),
)


@given(
    st.integers(8, 64),
    st.lists(st.tuples(st.floats(0, 100), COUNTERS, st.booleans()), max_size=50),
)
def test_stays_within_its_bounds_whatever_an_engine_says(
    first: int, looks: list[tuple[float, EngineCounters, bool]]
) -> None:
    target = ConcurrencyTarget(first)
    now = 0.0
    for after_s, counters, queued in looks:
        now += after_s
        before = target.value
        value = target.update(now, counters, queued=queued)
        assert 1 <= value <= max(MAX_TARGET, first)
        assert value <= 2 * before


# On an engine. `demand` requests are always there: those beyond the target wait in the gateway.


def tokens_per_second(
    engine: SimulatedEngine, shape: tuple[int, int, int, int], fixed: int | None, seconds: float
) -> tuple[float, int]:
    """Return the rate of the second half of a run, and the greatest number waiting there in it."""
    chance = random.Random(7)
    least_prompt, most_prompt, least_answer, most_answer = shape
    target = ConcurrencyTarget(8)
    now, looked, generated, waited = 0.0, 0.0, 0, 0
    half = None
    while now < seconds:
        for _ in range((fixed or target.value) - engine.in_flight):
            engine.submit(
                chance.randint(least_prompt, most_prompt),
                chance.randint(least_answer, most_answer),
            )
        now += engine.step()
        if now - looked >= 1.0:
            looked = now
            counters = engine.counters()
            if half is not None:
                waited = max(waited, counters.waiting)
            if fixed is None:
                target.update(now, counters, queued=True)
        if half is None and now >= seconds / 2:
            half, generated = now, engine.generated
    assert half is not None
    return (engine.generated - generated) / (now - half), waited


SHAPES = {
    "short": (20, 200, 20, 200),
    "long": (2_000, 6_000, 200, 800),
    "mixed": (20, 6_000, 20, 800),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "seqs", "kv_tokens", "best"),
    [  # Of the powers of two and the values halfway between them up to 384.
        ("short", 256, 100_000, 256),
        ("short", 64, 400_000, 64),
        ("short", 256, 25_000, 128),
        ("long", 256, 100_000, 24),
        ("long", 64, 400_000, 64),
        ("long", 256, 25_000, 8),
        ("mixed", 256, 100_000, 48),
        ("mixed", 64, 400_000, 64),
        ("mixed", 256, 25_000, 12),
    ],
)
def test_comes_near_the_best_fixed_value(shape: str, seqs: int, kv_tokens: int, best: int) -> None:
    def run(fixed: int | None) -> tuple[float, int]:
        return tokens_per_second(SimulatedEngine(seqs, kv_tokens), SHAPES[shape], fixed, 300)

    (rate, waited), (best_rate, _) = run(None), run(best)
    print(f"{shape}, {seqs}, {kv_tokens}: {rate / best_rate:.3f} of the best, {waited} waited")
    assert rate >= 0.95 * best_rate
    assert waited <= max(seqs // 4, 8)
