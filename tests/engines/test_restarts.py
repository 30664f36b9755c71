"""Backoff and budget of restarts, in seconds of service."""

from hypothesis import given
from hypothesis import strategies as st

from engines.restarts import RestartBudget
from engines.spec import Restart


def test_backoff_doubles_up_to_its_cap() -> None:
    budget = RestartBudget(Restart(backoff_s=1, max_backoff_s=5, budget=5, window_s=100))
    assert [budget.next(0.0) for _ in range(6)] == [1, 2, 4, 5, 5, None]


def test_restart_counts_no_longer_than_the_window() -> None:
    budget = RestartBudget(Restart(backoff_s=1, max_backoff_s=60, budget=2, window_s=100))
    assert budget.next(0.0) == 1
    assert budget.next(50.0) == 2
    assert budget.next(99.9) is None
    assert budget.next(100.0) == 2  # the first one no longer counts
    assert budget.next(300.0) == 1


def test_budget_of_zero_never_grants() -> None:
    assert RestartBudget(Restart(budget=0)).next(0.0) is None


@given(
    backoff=st.floats(0.01, 1000),
    cap=st.floats(0.01, 1000),
    size=st.integers(0, 200),
    window=st.floats(0.1, 1000),
    steps=st.lists(st.floats(0, 100), max_size=300),
)
def test_bounds_hold_for_any_sequence(
    backoff: float, cap: float, size: int, window: float, steps: list[float]
) -> None:
    budget = RestartBudget(
        Restart(backoff_s=backoff, max_backoff_s=cap, budget=size, window_s=window)
    )
    now = 0.0
    granted: list[float] = []
    for step in steps:
        now += step
        recent = [then for then in granted if now - then < window]
        wait = budget.next(now)
        if len(recent) >= size:
            assert wait is None
        else:
            assert wait is not None
            assert 0 < wait <= cap
            assert wait == min(cap, backoff * 2 ** min(len(recent), 64))
            granted.append(now)
