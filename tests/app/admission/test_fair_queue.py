"""The order of a fair queue: token shares by key, priorities, and removed requests."""

from collections import Counter, deque
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.admission import fair_queue
from app.admission.fair_queue import FairQueue, QueueEntry

Queue = FairQueue[str]


def push(
    queue: Queue, key: str, cost: float = 100, *, priority: int = 0, weight: float = 1.0
) -> QueueEntry[str]:
    """Add a request of a key; its item is the name of the key."""
    return queue.push(key, key, priority, weight, cost)


def served(queue: Queue, count: int | None = None) -> str:
    """Return the keys of the next `count` requests, by default of all."""
    return "".join(queue.pop().item for _ in range(queue.size if count is None else count))


def filled(requests: Iterable[str], **each: float) -> Queue:
    queue = Queue()
    for key in requests:
        queue.push(key, key, 0, each.get("weight", 1.0), each.get("cost", 100))
    return queue


class TestOnePriority:
    def test_new_queue_is_empty(self) -> None:
        queue = Queue()
        assert queue.size == 0
        assert queue.peek() is None
        with pytest.raises(IndexError):
            queue.pop()

    def test_requests_of_one_key_are_served_in_order(self) -> None:
        queue: FairQueue[int] = FairQueue()
        for number, cost in enumerate((1000, 1, 50)):
            queue.push(number, "a", 0, 1.0, cost)
        assert [queue.pop().item for _ in range(3)] == [0, 1, 2]

    def test_keys_take_turns_regardless_of_their_number_of_requests(self) -> None:
        assert served(filled("aaaaabbc")) == "abcabaaa"

    def test_ties_are_served_in_order_of_arrival(self) -> None:
        assert served(filled("dbca")) == "dbca"

    def test_huge_requests_do_not_delay_small_ones_of_another_key(self) -> None:
        queue = Queue()
        for _ in range(3):
            push(queue, "H", 1000)
        for _ in range(25):
            push(queue, "s", 100)
        assert served(queue) == "Hs" + "s" * 9 + "Hs" + "s" * 9 + "Hs" + "s" * 4

    def test_weight_is_the_share_of_tokens(self) -> None:
        queue = Queue()
        for _ in range(30):
            push(queue, "a", weight=1)
            push(queue, "b", weight=3)
        assert Counter(served(queue, 40)) == {"a": 10, "b": 30}

    def test_idle_key_gains_no_credit(self) -> None:
        queue = filled("a" * 200)
        served(queue, 100)
        for _ in range(100):
            push(queue, "b")
        assert abs(Counter(served(queue, 50))["a"] - 25) <= 1

    def test_key_that_returns_at_once_keeps_its_tag(self) -> None:
        queue = filled("b" * 20)
        push(queue, "H", 1000)
        assert served(queue, 2) == "bH"
        push(queue, "H", 1000)
        assert served(queue, 11) == "b" * 9 + "Hb"

    def test_tags_are_forgotten_when_the_queue_is_empty(self) -> None:
        queue = filled("H", cost=1_000_000)
        served(queue)
        push(queue, "H")
        push(queue, "s")
        push(queue, "s")
        assert served(queue) == "Hss"

    @pytest.mark.parametrize("cost", [0, -5])
    def test_free_request_counts_as_one_token(self, cost: int) -> None:
        queue = Queue()
        for _ in range(5):
            push(queue, "f", cost)
            push(queue, "a", 1)
        assert served(queue) == "fafafafafa"

    @pytest.mark.parametrize("cost", [10.0**30, float("inf")])
    def test_infinite_cost_harms_only_its_own_key(self, cost: float) -> None:
        queue = Queue()
        push(queue, "H", cost)
        push(queue, "H", cost)
        assert served(queue, 1) == "H"
        for _ in range(50):
            push(queue, "a")
            push(queue, "b")
        assert served(queue) == "ab" * 50 + "H"

    @pytest.mark.parametrize("weight", [0.0, -1.0])
    def test_key_without_weight_is_served_last(self, weight: float) -> None:
        queue = Queue()
        push(queue, "z", weight=weight)
        push(queue, "z", weight=weight)
        for _ in range(9):
            push(queue, "a")
        assert served(queue) == "z" + "a" * 9 + "z"


class TestRemove:
    def test_removed_request_is_not_served(self) -> None:
        queue = Queue()
        entries = [push(queue, key) for key in "abc"]
        queue.remove(entries[1])
        assert queue.size == 2
        assert served(queue) == "ac"

    def test_request_removed_from_the_middle_costs_its_key_nothing(self) -> None:
        queue = Queue()
        push(queue, "a")
        huge = push(queue, "a", 1_000_000)
        push(queue, "a")
        for _ in range(3):
            push(queue, "b")
        queue.remove(huge)
        assert served(queue) == "ababb"

    def test_request_removed_from_the_head_leaves_its_turn_to_the_next(self) -> None:
        queue: FairQueue[str] = FairQueue()
        first = queue.push("a1", "a", 0, 1.0, 1000)
        queue.push("b1", "b", 0, 1.0, 100)
        queue.push("a2", "a", 0, 1.0, 100)
        queue.remove(first)
        assert [queue.pop().item for _ in range(2)] == ["a2", "b1"]

    def test_remove_after_remove_or_pop_has_no_effect(self) -> None:
        queue = Queue()
        entry = push(queue, "a")
        other = push(queue, "b")
        queue.remove(other)
        queue.remove(other)
        assert queue.pop() is entry
        queue.remove(entry)
        assert queue.size == 0
        push(queue, "a")
        queue.remove(entry)
        assert served(queue) == "a"

    def test_key_that_left_and_returned_has_no_advantage(self) -> None:
        queue = filled("bbbbb")
        served(queue, 2)
        queue.remove(push(queue, "a"))
        for _ in range(3):
            push(queue, "a")
        # "b" has had its share up to the virtual time and stands there too.
        assert Counter(served(queue, 4)) == {"a": 2, "b": 2}

    def test_key_whose_only_request_left_can_return(self) -> None:
        queue = filled("bbb")
        queue.remove(push(queue, "a"))
        queue.remove(push(queue, "c"))
        assert served(queue, 2) == "bb"
        push(queue, "a")
        push(queue, "c")
        assert served(queue) == "acb"

    def test_remembered_key_can_return(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fair_queue, "REMEMBERED", 1)
        queue = filled("Hb" + "b" * 20)
        push(queue, "H", 1000)
        served(queue, 3)
        queue.remove(push(queue, "H"))
        for key in "xyz":  # enough new ones to sweep the others
            queue.remove(push(queue, key))
        push(queue, "H")
        assert served(queue, 11) == "b" * 10 + "H"

    def test_keys_that_left_are_forgotten(self) -> None:
        queue = Queue()
        push(queue, "stays")
        for number in range(20 * fair_queue.REMEMBERED):
            queue.remove(push(queue, f"key-{number}"))
        [group] = queue._classes.values()
        assert len(group._flows) <= 2 * fair_queue.REMEMBERED
        assert len(group._heap) <= 2 * fair_queue.REMEMBERED
        assert served(queue) == "stays"

    def test_number_of_remembered_keys_is_bounded(self) -> None:
        queue = Queue()
        for _ in range(2):
            push(queue, "stays")
        served(queue, 1)
        for number in range(20 * fair_queue.REMEMBERED):
            push(queue, f"key-{number}", 1000)
            push(queue, f"key-{number}", 1000)
            queue.pop()
        waiting = queue.size
        [group] = queue._classes.values()
        assert len(group._flows) <= 2 * (waiting + fair_queue.REMEMBERED)

    def test_empty_queue_remembers_nothing(self) -> None:
        queue = filled("abc")
        queue.remove(push(queue, "d", priority=5))
        served(queue)
        assert queue._classes == {}
        assert queue._order == []


class TestPriorities:
    def test_lower_number_comes_first(self) -> None:
        queue = Queue()
        for priority, key in ((5, "c"), (0, "b"), (-3, "a"), (5, "c"), (-3, "a")):
            push(queue, key, priority=priority)
        assert served(queue) == "aabcc"

    def test_one_token_in_ten_goes_to_the_lower_priority(self) -> None:
        queue = Queue()
        for _ in range(60):
            push(queue, ".", priority=0)
        for _ in range(4):
            push(queue, "x", priority=1)
        assert served(queue, 50) == ("." * 9 + "x") * 4 + "." * 10

    def test_share_is_of_tokens_not_requests(self) -> None:
        queue = Queue()
        for _ in range(60):
            push(queue, ".", 100, priority=0)
        for _ in range(2):
            push(queue, "X", 200, priority=1)
        assert served(queue, 40) == "." * 18 + "X" + "." * 18 + "X" + ".."

    def test_lower_priority_gets_its_share_of_a_short_queue(self) -> None:
        queue = Queue()
        push(queue, "x", priority=1)
        turns = ""
        while "x" not in turns:
            push(queue, ".", priority=0)
            turns += served(queue, 1)
        assert turns == "." * 9 + "x"

    def test_lower_priorities_take_turns(self) -> None:
        queue = Queue()
        for _ in range(200):
            push(queue, ".", priority=0)
        for key, priority in (("a", 1), ("b", 2), ("c", 3)):
            for _ in range(5):
                push(queue, key, priority=priority)
        assert served(queue, 90).replace(".", "") == "abcabcabc"

    def test_new_lower_priority_has_no_credit(self) -> None:
        queue = filled("." * 100)
        served(queue, 50)
        push(queue, "x", priority=1)
        assert served(queue, 10) == "." * 9 + "x"

    def test_tokens_due_are_forgotten_when_the_lower_priority_is_empty(self) -> None:
        queue = filled("." * 100)
        for _ in range(3):
            entry = push(queue, "x", priority=1)
            assert served(queue, 8) == "." * 8
            queue.remove(entry)

    def test_keys_share_within_each_priority(self) -> None:
        queue = Queue()
        for key in "bbba":
            push(queue, key, priority=1)
        for key in "dddc":
            push(queue, key, priority=0)
        assert served(queue) == "dcddbabb"


KEYS = "abcd"
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.5, "d": 7.0}
PUSH = st.tuples(st.just("push"), st.sampled_from(KEYS), st.integers(1, 500))
POP = st.tuples(st.just("pop"), st.just(""), st.just(0))
LEAVE = st.tuples(st.just("leave"), st.just(""), st.integers(0, 100))
STEPS = st.lists(st.one_of(PUSH, PUSH, POP, LEAVE), max_size=120)


@given(
    steps=STEPS,
    # 0 and 2: keys are forgotten all the time, which must not show in who is served.
    remembered=st.sampled_from([0, 2, 256]),
)
def test_waiting_keys_are_served_by_weight_within_one_largest_request_of_each(
    steps: list[tuple[str, str, int]], remembered: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair_queue, "REMEMBERED", remembered)
        queue: FairQueue[str] = FairQueue()
        entries: list[QueueEntry[str]] = []
        waiting: Counter[str] = Counter()
        largest = Counter(dict.fromkeys(KEYS, 0))
        pairs = [(one, two) for one in KEYS for two in KEYS if one < two]
        # For each pair, since when both wait: how far one is ahead of the other, at each moment.
        ahead: dict[tuple[str, str], list[float]] = {pair: [0.0] for pair in pairs}
        for what, key, number in steps:
            if what == "push":
                entries.append(queue.push(key, key, 0, WEIGHTS[key], number))
                waiting[key] += 1
                largest[key] = max(largest[key], number)
                continue
            if not entries:
                continue
            if what == "pop":
                both = [pair for pair in pairs if waiting[pair[0]] and waiting[pair[1]]]
                entry = queue.pop()
                key = entry.item
                for one, two in both:
                    if key in (one, two):
                        step = entry.cost / WEIGHTS[key] * (1 if key == one else -1)
                        ahead[one, two].append(ahead[one, two][-1] + step)
                        spread = max(ahead[one, two]) - min(ahead[one, two])
                        bound = largest[one] / WEIGHTS[one] + largest[two] / WEIGHTS[two]
                        assert spread <= bound + 1e-6
                entries.remove(entry)
            else:
                entry = entries.pop(number % len(entries))
                queue.remove(entry)
            waiting[entry.item] -= 1
            for pair in pairs:
                if not waiting[pair[0]] or not waiting[pair[1]]:
                    ahead[pair] = [0.0]


PUSH_IN_CLASS = st.tuples(
    st.just("push"), st.sampled_from(KEYS), st.sampled_from([0, 0, 0, 0, 1, -1])
)


@pytest.mark.parametrize("remembered", [0, 2, 256])
@given(steps=st.lists(st.one_of(PUSH_IN_CLASS, PUSH_IN_CLASS, POP, LEAVE), max_size=100))
def test_each_request_is_served_once_or_removed_and_keys_keep_their_order(
    steps: list[tuple[str, str, int]], remembered: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair_queue, "REMEMBERED", remembered)
        _check_that_each_is_served_once(steps)


def _check_that_each_is_served_once(steps: list[tuple[str, str, int]]) -> None:
    queue: FairQueue[int] = FairQueue()
    entries: dict[int, QueueEntry[int]] = {}
    lines: dict[tuple[str, int], deque[int]] = {}
    line_of: dict[int, tuple[str, int]] = {}
    for number, (what, key, argument) in enumerate(steps):
        if what == "push":
            entries[number] = queue.push(number, key, argument, 1.0, 1 + number % 7)
            line_of[number] = key, argument
            lines.setdefault((key, argument), deque()).append(number)
        elif entries and what == "pop":
            head = queue.peek()
            entry = queue.pop()
            assert entry is head
            assert entries.pop(entry.item) is entry
            assert lines[line_of[entry.item]].popleft() == entry.item
        elif entries:
            gone = list(entries)[argument % len(entries)]
            queue.remove(entries.pop(gone))
            lines[line_of[gone]].remove(gone)
        assert queue.size == len(entries)
    assert {queue.pop().item for _ in range(queue.size)} == set(entries)


@given(
    costs=st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(1, 3)),
        min_size=1,
        max_size=12,
    )
)
def test_lower_priorities_get_one_tenth_of_the_tokens(
    costs: list[tuple[int, int, int]],
) -> None:
    queue: FairQueue[bool] = FairQueue()
    for first, behind, priority in costs * 20:
        queue.push(True, "a", 0, 1.0, first)
        queue.push(False, "b", priority, 1.0, behind)
    tokens = {True: 0.0, False: 0.0}
    while queue.size > 20 * len(costs):  # as long as both must still wait
        entry = queue.pop()
        tokens[entry.item] += entry.cost
        assert tokens[False] <= tokens[True] / 9 + 1e-6
        assert tokens[False] >= tokens[True] / 9 - 300 - 300 / 9


class TestCorrections:
    def test_a_key_that_takes_less_than_it_may_keeps_its_share(self) -> None:
        queue = filled("aaaaaaaabbbbbbbb")
        order = ""
        for _ in range(8):
            entry = queue.pop()
            order += entry.item
            queue.correct(entry, 100)
            if entry.item == "a":  # it may take ten times what it takes
                push(queue, "a", 1000)
        assert order == "abababab"

    def test_a_key_that_takes_more_than_was_expected_waits_longer(self) -> None:
        queue = filled("aabbb")
        queue.correct(queue.pop(), 250)
        assert served(queue) == "bbba"

    def test_a_tag_never_moves_before_the_virtual_time(self) -> None:
        queue = filled("aaabbb", cost=1000)
        first, *_ = [queue.pop() for _ in range(4)]  # abab
        queue.correct(first, 1)
        queue.correct(first, 1)  # again, to no effect
        assert served(queue) == "ab"

    def test_corrections_of_a_key_that_left_go_with_its_next_request(self) -> None:
        queue = filled("ab", cost=1000)
        entry = queue.pop()
        push(queue, "c", 100)
        queue.correct(entry, 2500)
        push(queue, "a", 100)
        push(queue, "b", 100)
        assert served(queue) == "bcba"

    def test_corrections_after_the_queue_was_empty_have_no_effect(self) -> None:
        queue = filled("a")
        entry = queue.pop()
        queue.correct(entry, 9000)
        for key in "ab":
            push(queue, key)
        assert served(queue) == "ab"

    def test_moved_tags_are_forgotten(self) -> None:
        queue = filled("ab" * 1100)
        for _ in range(2000):
            queue.correct(queue.pop(), 50)
        assert len(queue._classes[0]._heap) <= 2 * 2 + fair_queue.REMEMBERED + 1


@given(
    estimates=st.lists(st.integers(1, 2000), min_size=40, max_size=40),
    actual=st.lists(st.integers(1, 300), min_size=40, max_size=40),
)
def test_shares_are_of_what_was_taken_not_of_what_was_expected(
    estimates: list[int], actual: list[int]
) -> None:
    """One slot: an item is corrected before the next is served, so estimates do not matter."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for key in "ab":
        for number, cost in enumerate(estimates if key == "a" else [1] * 40):
            queue.push((key, number), key, 0, 1.0, cost)
    taken = {"a": 0, "b": 0}
    left = {"a": 40, "b": 40}
    while left["a"] and left["b"]:
        entry = queue.pop()
        key, number = entry.item
        queue.correct(entry, actual[number])
        taken[key] += actual[number]
        left[key] -= 1
        assert abs(taken["a"] - taken["b"]) <= 2 * 300
