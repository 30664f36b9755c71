"""The order of requests with deadlines, and how many are served before a new one."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.admission import fair_queue
from app.admission.fair_queue import FairQueue, QueueEntry
from app.admission.service_rate import ServiceRate

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.5}
DEADLINES = st.one_of(st.none(), st.integers(1, 9).map(float))
PUSH = st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(1, 500), DEADLINES)
POP = st.tuples(st.just("pop"), st.just(""), st.just(0), st.none())
LEAVE = st.tuples(st.just("leave"), st.just(""), st.integers(0, 100), st.none())
Step = tuple[str, str, int, float | None]


def test_the_earliest_deadline_of_a_key_is_first_and_those_without_are_last() -> None:
    queue: FairQueue[str] = FairQueue()
    for item, deadline in (("late", 9.0), ("none", None), ("soon", 1.0), ("then", 5.0)):
        queue.push(item, "a", 0, 1.0, 100, deadline)
    assert [queue.pop().item for _ in range(4)] == ["soon", "then", "late", "none"]


def test_equal_deadlines_are_served_in_order_of_arrival() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(5):
        queue.push(number, "a", 0, 1.0, 100, 1.0)
    assert [queue.pop().item for _ in range(5)] == [0, 1, 2, 3, 4]


@given(steps=st.lists(st.one_of(PUSH, PUSH, POP, LEAVE), max_size=80))
def test_deadlines_change_no_keys_turn(steps: list[Step]) -> None:
    """With equal costs, whose turn it is does not depend on deadlines."""
    plain: FairQueue[str] = FairQueue()
    dated: FairQueue[str] = FairQueue()
    for what, key, _, deadline in steps:
        if what == "push":
            plain.push(key, key, 0, WEIGHTS[key], 100)
            dated.push(key, key, 0, WEIGHTS[key], 100, deadline)
        elif what == "pop" and plain.size:
            assert plain.pop().item == dated.pop().item


@given(
    steps=st.lists(st.one_of(PUSH, PUSH, POP, LEAVE), max_size=80),
    key=st.sampled_from("abcd"),
    deadline=st.integers(0, 10).map(float),
)
def test_so_many_are_served_before_a_new_request_as_were_counted(
    steps: list[Step], key: str, deadline: float
) -> None:
    queue: FairQueue[str] = FairQueue()
    entries: list[QueueEntry[str]] = []
    for step, (what, owner, number, due) in enumerate(steps):
        if what == "push":
            cost = 100 + number + step * 2**0.5 / 1000  # no two tags are equal but the first
            entries.append(queue.push(owner, owner, 0, WEIGHTS[owner], cost, due))
        elif entries and what == "pop":
            entries.remove(queue.pop())
        elif entries:
            queue.remove(entries.pop(number % len(entries)))
    counted = queue.count_ahead(key, 0, deadline)
    assert counted == _served_before(queue, key, deadline)


def _served_before(queue: FairQueue[str], key: str, deadline: float) -> int:
    """Return how many requests are served before a new one, by serving them."""
    with_it = copy.deepcopy(queue)
    with_it.push("new", key, 0, WEIGHTS.get(key, 1.0), 100, deadline)
    return [with_it.pop().item for _ in range(with_it.size)].index("new")


@given(
    pushes=st.lists(st.tuples(st.sampled_from("ab"), DEADLINES), min_size=1, max_size=60),
    served=st.integers(0, 20),
    key=st.sampled_from("abd"),
    deadline=st.integers(0, 10).map(float),
    most=st.integers(2, 8),
)
def test_of_requests_of_one_size_the_count_is_exact_however_few_are_looked_at(
    pushes: list[tuple[str, float | None]], served: int, key: str, deadline: float, most: int
) -> None:
    queue: FairQueue[str] = FairQueue()
    for owner, due in pushes:
        queue.push(owner, owner, 0, 1.0, 100, due)
    for _ in range(min(served, queue.size - 1)):
        queue.pop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair_queue, "MAX_COUNTED", most)
        counted = queue.count_ahead(key, 0, deadline)
    plain = queue.count_ahead(key, 0, deadline)
    # Of two keys at one moment the number of the tag decides, which an estimate does not have.
    assert abs(counted - plain) <= 1
    assert abs(plain - _served_before(queue, key, deadline)) <= 1


@given(
    costs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(50, 200)), max_size=80),
    deadline=st.integers(0, 10).map(float),
    most=st.integers(1, 8),
    keys=st.integers(1, 3),
)
def test_an_estimate_counts_own_requests_that_are_due_and_no_more_than_wait(
    costs: list[tuple[str, int]], deadline: float, most: int, keys: int
) -> None:
    queue: FairQueue[str] = FairQueue()
    for owner, cost in costs:
        queue.push(owner, owner, 0, 1.0, cost, cost % 10.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair_queue, "MAX_COUNTED", most)
        patch.setattr(fair_queue, "MAX_KEYS_COUNTED", keys)
        counted = queue.count_ahead("a", 0, deadline)
    due = [owner for owner, cost in costs if owner == "a" and cost % 10 <= deadline]
    assert len(due) <= counted <= queue.size


@pytest.mark.parametrize("keys", [1, 50, 5000])
def test_few_requests_are_looked_at_in_a_long_queue(
    keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(10_000):
        queue.push(number, f"key-{number % keys}", 0, 1.0, 100, float(number))
    looked_at = 0
    in_order = fair_queue._Flow.in_order

    def counting(flow: fair_queue._Flow[Any]) -> Iterator[QueueEntry[Any]]:
        nonlocal looked_at
        for entry in in_order(flow):
            looked_at += 1
            yield entry

    monkeypatch.setattr(fair_queue._Flow, "in_order", counting)
    queue.push(-1, "new", 0, 1.0, 1_000_000, 0.0)
    assert queue.count_ahead("new", 0, 1.0) == 10_001
    assert looked_at <= fair_queue.MAX_COUNTED


def test_requests_of_other_keys_count_in_the_order_of_their_deadlines() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("b", "b", 0, 1.0, 100)
    queue.push("small", "a", 0, 1.0, 100)
    queue.push("large", "a", 0, 1.0, 500, 1.0)  # first of its key, which then has to wait
    queue.push("b", "b", 0, 1.0, 100, 1.0)
    assert queue.count_ahead("b", 0, 1.0) == 2
    queue.push("new", "b", 0, 1.0, 100, 1.0)
    assert [queue.pop().item for _ in range(4)] == ["b", "large", "new", "b"]


def test_higher_priorities_are_ahead_and_lower_ones_are_not() -> None:
    queue: FairQueue[str] = FairQueue()
    for priority in (-1, -1, 0, 1, 1, 1):
        queue.push("x", f"key {priority}", priority, 1.0, 100)
    assert queue.count_ahead("new", 0, 1.0) == 3
    assert queue.count_ahead("new", 7, 1.0) == 6


def test_removed_deadlines_are_forgotten() -> None:
    queue: FairQueue[int] = FairQueue()
    first = queue.push(0, "a", 0, 1.0, 100, 0.0)
    for number in range(1000):
        queue.remove(queue.push(number, "a", 0, 1.0, 100, 1.0))
    assert len(first.flow.by_deadline) < 10


def test_the_wait_is_expected_by_the_latest_rate() -> None:
    rate = ServiceRate()
    rate.restart(0.0)
    assert rate.expected_wait_s(5, 2.0) is None
    rate.record_served(2.0)
    rate.record_served(4.0)
    assert rate.expected_wait_s(4, 4.0) == 10.0
    assert rate.likely_wait_s(1, 4.0) == 8.0  # two are to be served, and two were: 4 ± 4
    for second in range(6, 70, 2):
        rate.record_served(float(second))
    assert rate.likely_wait_s(31, 64.0) == 80.0  # of 32 either way
