"""The arithmetic of buckets, under any limit, any burst and a clock of the test's own."""

from itertools import accumulate, permutations
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from app.limits import bucket

# Twice the finest step of a server's clock.
MOMENT_S = 2e-6
TOLERANCE = 1e-6

limits = st.integers(1, 10**9)
bursts = st.floats(1, 60)
debts = st.floats(0, 1e4)
amounts = st.integers(1, 10**7)
# Steps of a clock in seconds, and what is asked for after each.
asks = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 2000)), max_size=60)


def admitted(
    steps: list[tuple[float, int]], limit: int, burst_s: float
) -> list[tuple[float, float]]:
    """Return when what was let through, in seconds of refill."""
    full_at, now, passed = 0.0, 0.0, []
    for step_s, amount in steps:
        now += step_s
        cost_s = bucket.seconds(amount, limit)
        if bucket.wait(bucket.debt(full_at, now), cost_s, burst_s) == 0:
            full_at = bucket.charge(full_at, now, cost_s)
            passed.append((now, cost_s))
    return passed


@given(asks, st.integers(1, 10**5), bursts)
def test_no_window_admits_more_than_a_full_bucket_and_its_refill(
    steps: list[tuple[float, int]], limit: int, burst_s: float
) -> None:
    """A request that is larger than a full bucket counts instead of it, once."""
    passed = admitted(steps, limit, burst_s)
    for start, (begin, _) in enumerate(passed):
        totals = accumulate(cost_s for _, cost_s in passed[start:])
        for (end, cost_s), total_s in zip(passed[start:], totals, strict=True):
            assert total_s <= max(burst_s, cost_s) + (end - begin) + TOLERANCE


@given(asks, st.integers(1, 10**5), bursts)
def test_request_passes_after_its_wait_and_not_before(
    steps: list[tuple[float, int]], limit: int, burst_s: float
) -> None:
    full_at, now = 0.0, 0.0
    for step_s, amount in steps:
        now += step_s
        cost_s = bucket.seconds(amount, limit)
        wait_s = bucket.wait(bucket.debt(full_at, now), cost_s, burst_s)
        if wait_s > MOMENT_S:
            early = bucket.debt(full_at, now + wait_s - MOMENT_S)
            assert bucket.wait(early, cost_s, burst_s) > 0
        now += wait_s
        assert bucket.wait(bucket.debt(full_at, now), cost_s, burst_s) == 0
        full_at = bucket.charge(full_at, now, cost_s)


@given(debts, limits, bursts, amounts)
def test_a_wait_is_never_longer_than_the_refill(
    debt_s: float, limit: int, burst_s: float, amount: int
) -> None:
    assert bucket.wait(debt_s, bucket.seconds(amount, limit), burst_s) <= debt_s


@given(limits, bursts, st.integers(1, 10**12))
def test_full_bucket_admits_any_request(limit: int, burst_s: float, amount: int) -> None:
    assert bucket.wait(0.0, bucket.seconds(amount, limit), burst_s) == 0


@given(limits, bursts, st.integers(1, 10**9), st.floats(1e-3, 60))
def test_request_larger_than_the_bucket_waits_until_it_is_full(
    limit: int, burst_s: float, excess: int, debt_s: float
) -> None:
    cost_s = burst_s + bucket.seconds(excess, limit)
    assert abs(bucket.wait(debt_s, cost_s, burst_s) - debt_s) < TOLERANCE


@given(st.floats(0, 1e8), debts, limits, amounts)
def test_a_refund_restores_what_was_charged(
    now: float, debt_s: float, limit: int, amount: int
) -> None:
    cost_s = bucket.seconds(amount, limit)
    before = now + debt_s
    after = bucket.charge(bucket.charge(before, now, cost_s), now, -cost_s)
    assert abs(after - before) <= TOLERANCE * max(1, cost_s)


@given(st.floats(0, 1e8), debts, st.floats(0, 1e6))
def test_refund_never_exceeds_capacity(now: float, debt_s: float, refund_s: float) -> None:
    assert bucket.charge(now + debt_s, now, -refund_s) >= now


@given(st.floats(0, 1e6), st.lists(st.floats(0.001, 100), min_size=2, max_size=4))
def test_simultaneous_charges_commute(now: float, costs: list[float]) -> None:
    ends = set()
    for order in permutations(costs):
        full_at = 0.0
        for cost_s in order:
            full_at = bucket.charge(full_at, now, cost_s)
        ends.add(round(full_at - now, 4))
    assert max(ends) - min(ends) <= 1.1e-4


@given(st.lists(st.tuples(st.floats(-30, 30), st.integers(1, 2000)), max_size=60), bursts)
def test_backward_clock_admits_no_more(steps: list[tuple[float, int]], burst_s: float) -> None:
    passed = admitted(
        [(abs(step_s), amount) for step_s, amount in steps[:1]] + steps[1:], 600, burst_s
    )
    if passed:
        span = max(now for now, _ in passed) - min(now for now, _ in passed)
        largest = max(cost_s for _, cost_s in passed)
        total = sum(cost_s for _, cost_s in passed)
        assert total <= burst_s + largest + span + TOLERANCE


@given(debts, st.floats(0, 100), limits, bursts, amounts)
def test_backward_clock_adds_at_most_the_lost_time_to_a_wait(
    debt_s: float, back_s: float, limit: int, burst_s: float, amount: int
) -> None:
    now, cost_s = 1000.0, bucket.seconds(amount, limit)
    before = bucket.wait(bucket.debt(now + debt_s, now), cost_s, burst_s)
    after = bucket.wait(bucket.debt(now + debt_s, now - back_s), cost_s, burst_s)
    assert after <= before + back_s + TOLERANCE


@given(debts, bursts, amounts)
def test_zero_limit_admits_nothing(debt_s: float, burst_s: float, amount: int) -> None:
    assert bucket.wait(debt_s, bucket.seconds(amount, 0), burst_s) == inf
    assert bucket.remaining(debt_s, 0, burst_s) == 0


@given(debts, limits | st.just(0), bursts)
def test_zero_cost_always_passes(debt_s: float, limit: int, burst_s: float) -> None:
    assert bucket.wait(debt_s, bucket.seconds(0, limit), burst_s) == 0


@given(st.integers(1, 10**6), st.integers(1, 60), st.data())
def test_remaining_amount_is_available_at_once(
    limit: int, burst_s: int, data: st.DataObject
) -> None:
    used = data.draw(st.integers(0, limit * burst_s // 60))
    debt_s = bucket.seconds(used, limit)
    left = bucket.remaining(debt_s, limit, burst_s)
    assert left == limit * burst_s // 60 - used
    assert bucket.wait(debt_s, bucket.seconds(left, limit), burst_s) == 0


@given(st.integers(1, 600), st.integers(1, 600))
def test_changed_limit_keeps_the_time_until_the_bucket_is_full(old: int, new: int) -> None:
    full_at = bucket.charge(0.0, 100.0, bucket.seconds(old, old))
    assert bucket.debt(full_at, 100.0) == 60.0
    assert bucket.remaining(60.0, new, 60.0) == 0
    assert bucket.remaining(bucket.debt(full_at, 130.0), new, 60.0) == new // 2
