"""The number of engines for a load: rules one by one, and whole days in a simulation."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.scaling import Load, ScalingPolicy, ScalingTerms
from app.scaling.policy import DOWN_S, DOWN_STARTS, UP_S
from tests.app.scaling.simulation import Outcome, Rate, fixed, simulate

TERMS = ScalingTerms(least=1, most=8, slots=8, target_wait_s=5.0)
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
BUSY = Load(in_flight=8, waiting=40, ended=0, engines=1, ready=1)
IDLE = Load(in_flight=0, waiting=0, ended=0, engines=3, ready=3)


def decisions(policy: ScalingPolicy, load: Load, seconds: float, begin: float = 0.0) -> list[int]:
    """Return what a policy decides each second under a load that does not change."""
    return [policy.decide(begin + second, load) for second in range(int(seconds))]


def test_a_queue_that_lasts_starts_an_engine() -> None:
    assert decisions(ScalingPolicy(TERMS), BUSY, UP_S + 1) == [*[1] * int(UP_S), 2]


def test_a_burst_that_is_worked_off_starts_none() -> None:
    policy = ScalingPolicy(TERMS)
    for second in range(100):
        load = BUSY if second % 10 < 8 else IDLE
        assert policy.decide(second, Load(load.in_flight, load.waiting, second, 1, 1)) == 1


def test_a_queue_that_is_shorter_than_the_target_starts_none() -> None:
    policy = ScalingPolicy(TERMS)
    for second in range(100):  # two end each second, so four wait two seconds
        assert policy.decide(second, Load(8, 4, 2 * second, 1, 1)) == 1


def test_nothing_is_decided_while_an_engine_starts() -> None:
    starting = Load(in_flight=8, waiting=400, ended=0, engines=2, ready=1)
    assert set(decisions(ScalingPolicy(TERMS), starting, 100)) == {2}


def test_engines_at_most_double_at_once() -> None:
    policy = ScalingPolicy(TERMS)
    for second in range(100):  # each engine ends one request a second, and twenty arrive
        wanted = policy.decide(second, Load(16, 18 * second, 2 * second, 2, 2))
    assert wanted == 4


def test_engines_stop_while_another_starts_for_ever() -> None:
    waiting = Load(in_flight=0, waiting=0, ended=0, engines=3, ready=2)
    assert decisions(ScalingPolicy(TERMS), waiting, DOWN_S + 1) == [*[3] * int(DOWN_S), 2]


def test_a_server_that_comes_back_stops_no_engine_before_its_time() -> None:
    policy = ScalingPolicy(TERMS)
    alone = Load(in_flight=36, waiting=0, ended=0, engines=4, ready=4)
    helped = Load(in_flight=36, waiting=0, ended=0, engines=4, ready=4, servers=4.0)
    assert set(decisions(policy, alone, DOWN_S + 1)) == {4}
    assert decisions(policy, helped, DOWN_S + 1, DOWN_S + 1)[:: int(DOWN_S)] == [4, 3]


def test_a_server_that_misses_a_check_starts_no_engine() -> None:
    policy = ScalingPolicy(TERMS)
    for second in range(100):
        missing = second % int(UP_S) == 0
        load = Load(39, 8 * missing, 0, 1, 1, servers=0.0 if missing else 4.0)
        assert policy.decide(second, load) == 1


def test_new_terms_forget_nothing() -> None:
    policy = ScalingPolicy(TERMS)
    for second in range(int(UP_S)):
        assert policy.decide(second, BUSY) == 1
    policy.terms = ScalingTerms(least=1, most=9, slots=8, target_wait_s=5.0)
    assert policy.decide(UP_S, BUSY) == 2


def test_idle_engines_stop_one_after_the_other() -> None:
    policy = ScalingPolicy(TERMS)
    assert decisions(policy, IDLE, DOWN_S + 1) == [*[3] * int(DOWN_S), 2]


def test_engines_that_start_slowly_stay_longer() -> None:
    slow = Load(in_flight=0, waiting=0, ended=0, engines=3, ready=3, start_s=1000.0)
    found = decisions(ScalingPolicy(TERMS), slow, DOWN_STARTS * 1000.0 + 1)
    assert found == [*[3] * int(DOWN_STARTS * 1000.0), 2]


def test_an_engine_whose_requests_would_fill_the_others_stays() -> None:
    busy = Load(in_flight=14, waiting=0, ended=0, engines=3, ready=3)  # 1.75 of 2
    assert set(decisions(ScalingPolicy(TERMS), busy, 2 * DOWN_S)) == {3}


loads = st.builds(
    Load,
    in_flight=st.integers(0, 100),
    waiting=st.integers(0, 1000),
    ended=st.integers(0, 10_000),
    engines=st.integers(0, 12),
    ready=st.integers(0, 12),
    start_s=st.none() | st.floats(0, 2000),
)


@given(
    steps=st.lists(st.tuples(st.floats(0, 1000), loads), min_size=1, max_size=60),
    least=st.integers(1, 4),
    more=st.integers(0, 6),
)
def test_any_load_stays_within_the_bounds(
    steps: list[tuple[float, Load]], least: int, more: int
) -> None:
    policy, now = ScalingPolicy(ScalingTerms(least, least + more, 8, 5.0)), 0.0
    for seconds, load in steps:
        now += seconds
        assert least <= policy.decide(now, load) <= least + more


@pytest.mark.slow
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), start_s=st.floats(5, 200))
def test_an_engine_is_not_stopped_soon_after_it_was_needed(seed: int, start_s: float) -> None:
    rate = random_trace(seed)
    outcome = simulate(
        ScalingPolicy(TERMS).decide, rate, HOUR_S, first=1, start_s=start_s, seed=seed
    )
    ups = [moment for (moment, after), (_, before) in steps_of(outcome) if after > before]
    for (moment, after), (_, before) in steps_of(outcome):
        if after < before:
            latest = max((up for up in ups if up < moment), default=-math.inf)
            assert moment - latest >= max(DOWN_S, DOWN_STARTS * start_s)


def steps_of(outcome: Outcome) -> list[tuple[tuple[float, int], tuple[float, int]]]:
    """Return each change of the engines with the one before."""
    return [(after, before) for before, after in pairwise(outcome.changes)]


def random_trace(seed: int) -> Rate:
    """Return rates that jump at random moments, with bursts in between."""
    dice = random.Random(seed)
    levels = [dice.choice((0.05, 0.3, 1.0, 2.5, 6.0)) for _ in range(60)]
    return lambda now: levels[min(int(now / 60), 59)]


TRACES: dict[str, Rate] = {
    "a day": lambda now: 1.3 - 1.25 * math.cos(now / DAY_S * 2 * math.pi),
    "steps of half an hour": lambda now: 0.3 if now // 1800 % 2 == 0 else 2.0,
    "bursts of 20 s": lambda now: 4.0 if now % 600 < 20 else 0.3,
    "a ramp": lambda now: 2.5 * now / (4 * HOUR_S),
    "even": lambda now: 0.5,
}


@pytest.mark.slow
@pytest.mark.parametrize("trace", TRACES)
def test_scaling_costs_less_than_a_fixed_fleet_that_serves_as_well(
    trace: str, show: Callable[[str], None]
) -> None:
    seconds = DAY_S if trace == "a day" else 4 * HOUR_S
    scaled = simulate(ScalingPolicy(TERMS).decide, TRACES[trace], seconds, first=1)
    late = scaled.late(TERMS.target_wait_s)
    shown = {"scaled 1 to 8": scaled}
    for number in range(1, 9):  # the first that serves as well is the cheapest
        other = simulate(fixed(number), TRACES[trace], seconds, first=number)
        shown[f"fixed {number}"] = other
        if other.late(TERMS.target_wait_s) <= late:
            break
    show("\n".join(line(*item) for item in shown.items()))
    assert other.late(TERMS.target_wait_s) <= late
    assert scaled.engine_s <= 1.1 * other.engine_s
    # The time of a start after each rise is all that is late.
    assert late < (0.35 if trace == "bursts of 20 s" else 0.12)


def line(name: str, outcome: Outcome) -> str:
    """Return one row of the comparison."""
    return (
        f"{name:14} {outcome.late(TERMS.target_wait_s):6.1%} waited over "
        f"{TERMS.target_wait_s:g} s, {outcome.engine_s / HOUR_S:5.1f} engine-hours, "
        f"{len(outcome.changes) - 1} changes"
    )
