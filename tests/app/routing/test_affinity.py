"""Policies that keep together what belongs together."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.routing.affinity import (
    BLOCK_BYTES,
    MOST_BLOCKS,
    SHARE,
    SLACK,
    PrefixAffinity,
    SessionAffinity,
    checksums,
    with_room,
)
from app.routing.policies import SelectionPolicy
from app.routing.replica import Replica
from engines.base import EngineState
from tests.app.routing.fakes import FakeClues, FakeEngine

NOT_READY = [state for state in EngineState if state is not EngineState.READY]
POLICIES = [SessionAffinity, PrefixAffinity]
CHANCE = random.Random(7)


def replica(name: str, in_flight: int = 0, state: EngineState = EngineState.READY) -> Replica:
    return Replica(FakeEngine(name, state), served_name="demo", in_flight=in_flight)


def replicas(count: int) -> list[Replica]:
    return [replica(f"demo-{number}") for number in range(count)]


def session(number: int) -> FakeClues:
    return FakeClues(asker=b"session %d" % number)


def text(blocks: float) -> bytes:
    """A piece of a prompt like no other."""
    return CHANCE.randbytes(int(blocks * BLOCK_BYTES))


def chosen(policy: SelectionPolicy, candidates: Sequence[Replica], clues: FakeClues) -> Replica:
    one = policy.choose(candidates, clues)
    assert one is not None
    return one


@pytest.mark.parametrize("made", POLICIES)
class TestBoth:
    def test_no_candidate_means_no_choice(self, made: type[SelectionPolicy]) -> None:
        assert made().choose([], FakeClues()) is None

    @pytest.mark.parametrize("state", EngineState)
    def test_an_only_candidate_is_chosen_in_any_state(
        self, made: type[SelectionPolicy], state: EngineState
    ) -> None:
        only = replica("only", 99, state)
        assert made().choose([only], FakeClues(b"s", text(3))) is only

    @pytest.mark.parametrize("state", NOT_READY)
    def test_one_that_is_not_ready_comes_last(
        self, made: type[SelectionPolicy], state: EngineState
    ) -> None:
        down, busy = replica("down", 0, state), replica("busy", 50)
        for number in range(20):
            clues = FakeClues(b"%d" % number, text(2))
            assert made().choose([down, busy], clues) is busy

    def test_where_none_is_ready_one_is_tried(self, made: type[SelectionPolicy]) -> None:
        down = [replica(name, state=EngineState.FAILED) for name in "ab"]
        assert made().choose(down, FakeClues(b"s", text(3))) in down

    def test_all_is_kept_together_while_there_is_room(self, made: type[SelectionPolicy]) -> None:
        candidates, policy = replicas(5), made()
        clues = FakeClues(b"s", text(4))
        assert len({id(policy.choose(candidates, clues)) for _ in range(20)}) == 1

    def test_what_is_asked_for_at_once_does_not_drown_one(
        self, made: type[SelectionPolicy]
    ) -> None:
        candidates, policy = replicas(4), made()
        clues = FakeClues(b"s", text(4))
        for _ in range(400):
            chosen(policy, candidates, clues).in_flight += 1
        assert max(one.in_flight for one in candidates) <= 100 * SHARE + SLACK + 1
        assert all(one.in_flight for one in candidates)

    def test_one_that_failed_is_not_chosen_again(self, made: type[SelectionPolicy]) -> None:
        candidates, policy = replicas(3), made()
        clues = FakeClues(b"s", text(4))
        left = list(candidates)
        while (one := policy.choose(left, clues)) is not None:
            left.remove(one)
        assert left == []

    @given(
        loads=st.lists(
            st.tuples(st.integers(0, 300), st.sampled_from(list(EngineState))),
            min_size=2,
            max_size=8,
        ),
        asker=st.binary(max_size=20),
        prompt=st.binary(max_size=40),
    )
    @settings(max_examples=100, deadline=None)
    def test_nobody_gets_more_than_its_share(
        self,
        made: type[SelectionPolicy],
        loads: list[tuple[int, EngineState]],
        asker: bytes,
        prompt: bytes,
    ) -> None:
        candidates = [replica(str(n), load, state) for n, (load, state) in enumerate(loads)]
        one = chosen(made(), candidates, FakeClues(asker, prompt * 60))
        ready = [r for r in candidates if r.engine.state is EngineState.READY] or candidates
        assert one in ready
        assert one.in_flight < SHARE * sum(r.in_flight for r in ready) / len(ready) + SLACK
        assert [r.in_flight for r in candidates] == [load for load, _ in loads]


class TestRoom:
    def test_a_few_requests_need_not_spread(self) -> None:
        one, other = replica("one", SLACK), replica("other")
        assert with_room([one, other]) == [one, other]

    def test_many_must(self) -> None:
        one, other = replica("one", 100), replica("other", 40)
        assert with_room([one, other]) == [other]

    @given(st.lists(st.integers(0, 10_000), min_size=1, max_size=10))
    @settings(max_examples=100, deadline=None)
    def test_somebody_always_has(self, loads: list[int]) -> None:
        candidates = [replica(str(n), load) for n, load in enumerate(loads)]
        assert min(candidates, key=lambda r: r.in_flight) in with_room(candidates)


class TestSession:
    def test_sessions_spread_evenly(self) -> None:
        policy, candidates = SessionAffinity(), replicas(4)
        counts = Counter(chosen(policy, candidates, session(n)).engine.name for n in range(4000))
        assert all(850 < counts[one.engine.name] < 1150 for one in candidates)

    def test_every_gateway_sends_a_session_to_the_same_replica(self) -> None:
        one, other = replicas(4), list(reversed(replicas(4)))
        for number in range(50):
            names = {
                chosen(SessionAffinity(), fleet, session(number)).engine.name
                for fleet in (one, other)
            }
            assert len(names) == 1

    def test_a_session_stays_where_it_was_in_the_version_before(self) -> None:
        """A roll-out must not move sessions, and two versions run at once meanwhile."""
        names = [chosen(SessionAffinity(), replicas(4), session(n)).engine.name for n in range(8)]
        assert [int(name[-1]) for name in names] == [1, 3, 3, 0, 3, 3, 1, 2]

    @given(count=st.integers(2, 8), gone=st.integers(0, 7))
    @settings(max_examples=20, deadline=None)
    def test_when_one_goes_only_its_own_sessions_move_and_return_with_it(
        self, count: int, gone: int
    ) -> None:
        policy, candidates = SessionAffinity(), replicas(count)
        lost = candidates[gone % count]
        before = [chosen(policy, candidates, session(n)) for n in range(100)]
        lost.engine.state = EngineState.FAILED  # type: ignore[misc]
        without = [chosen(policy, candidates, session(n)) for n in range(100)]
        for was, now in zip(before, without, strict=True):
            assert now is was if was is not lost else now is not lost
        lost.engine.state = EngineState.READY  # type: ignore[misc]
        assert [chosen(policy, candidates, session(n)) for n in range(100)] == before

    def test_the_sessions_of_one_that_goes_spread_over_the_others(self) -> None:
        policy, candidates = SessionAffinity(), replicas(5)
        moved = [n for n in range(2000) if chosen(policy, candidates, session(n)) is candidates[0]]
        counts = Counter(chosen(policy, candidates[1:], session(n)).engine.name for n in moved)
        assert len(counts) == 4
        assert max(counts.values()) < 2 * min(counts.values())


class TestPrefix:
    def test_a_conversation_stays_as_it_grows(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(4)
        prompt = text(2)
        first = chosen(policy, candidates, FakeClues(text=prompt))
        for _ in range(20):
            prompt += text(0.7)
            assert chosen(policy, candidates, FakeClues(text=prompt)) is first

    def test_the_longest_beginning_counts(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        system = text(3)
        here, there = system + text(3), system + text(3)
        first = chosen(policy, candidates, FakeClues(text=here))
        first.in_flight += 40
        second = chosen(policy, candidates, FakeClues(text=there))
        assert second is not first
        first.in_flight -= 40
        for _ in range(4):
            assert chosen(policy, candidates, FakeClues(text=here + text(1))) is first
            assert chosen(policy, candidates, FakeClues(text=there + text(1))) is second

    def test_those_who_know_as_much_share_what_is_new(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        system = text(4)
        for one in candidates:  # each is told while the other is busy
            other = next(r for r in candidates if r is not one)
            other.in_flight += 40
            assert chosen(policy, candidates, FakeClues(text=system)) is one
            other.in_flight -= 40
        counts: Counter[str] = Counter()
        for _ in range(20):
            counts[chosen(policy, candidates, FakeClues(text=system + text(2))).engine.name] += 1
        assert set(counts.values()) == {10}

    def test_new_prompts_spread_and_every_gateway_agrees(self) -> None:
        counts: Counter[str] = Counter()
        for _ in range(400):
            clues = FakeClues(text=text(2))
            names = {chosen(PrefixAffinity(), replicas(4), clues).engine.name for _ in range(2)}
            assert len(names) == 1
            counts.update(names)
        assert len(counts) == 4
        assert min(counts.values()) > 60

    def test_prompts_too_short_to_be_worth_it_go_to_the_least_loaded(self) -> None:
        policy, candidates = PrefixAffinity(), [replica("busy", 1), replica("idle")]
        for _ in range(4):
            assert chosen(policy, candidates, FakeClues(text=text(0.9))).engine.name == "idle"
        assert len(policy) == 0

    def test_memory_is_bounded_and_what_was_used_last_is_kept(self) -> None:
        policy, candidates = PrefixAffinity(most_known=100), replicas(3)
        hot = FakeClues(text=text(10))
        first = chosen(policy, candidates, hot)
        for _ in range(200):
            chosen(policy, candidates, FakeClues(text=text(10)))
            assert len(policy) <= 100
            assert chosen(policy, candidates, hot) is first

    def test_of_a_prompt_the_end_is_forgotten_first(self) -> None:
        policy, candidates = PrefixAffinity(most_known=4), replicas(4)
        prompt = text(4)
        first = chosen(policy, candidates, FakeClues(text=prompt))
        for other in candidates:  # the next is sent elsewhere, and takes the room of two blocks
            other.in_flight = 40 if other is first else 0
        chosen(policy, candidates, FakeClues(text=text(2)))
        first.in_flight = 0
        assert chosen(policy, candidates, FakeClues(text=prompt)) is first

    def test_a_replica_that_comes_is_given_work(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        system = text(4)
        for one in candidates:
            one.in_flight = 20
        chosen(policy, candidates, FakeClues(text=system))
        new = replica("new")
        assert chosen(policy, [*candidates, new], FakeClues(text=system + text(1))) is new

    @given(st.binary(max_size=3 * BLOCK_BYTES), st.binary(max_size=3 * BLOCK_BYTES))
    @settings(max_examples=50, deadline=None)
    def test_checksums_agree_exactly_as_far_as_whole_blocks_do(
        self, one: bytes, two: bytes
    ) -> None:
        same = 0
        limit = min(len(one), len(two))
        while same < limit and one[same] == two[same]:
            same += 1
        pairs = zip(checksums(one), checksums(two), strict=False)
        assert sum(a == b for a, b in pairs) == same // BLOCK_BYTES

    def test_a_prompt_is_looked_at_up_to_a_bound(self) -> None:
        policy = PrefixAffinity()
        policy.choose(replicas(2), FakeClues(text=text(MOST_BLOCKS * 2)))
        assert len(policy) == MOST_BLOCKS
