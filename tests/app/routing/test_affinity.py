"""The session and prefix affinity policies."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.routing.policies import (
    BLOCK_BYTES,
    LOAD_SLACK,
    MAX_LOAD_RATIO,
    MAX_PROMPT_BLOCKS,
    MIN_KNOWN_ENGINES,
    PrefixAffinity,
    SelectionPolicy,
    SessionAffinity,
    block_checksums,
    within_load_bound,
)
from app.routing.replica import Replica
from engines.base import EngineState
from tests.app.routing.fakes import FakeEngine, FakeHints

NOT_READY = [state for state in EngineState if state is not EngineState.READY]
POLICIES = [SessionAffinity, PrefixAffinity]
CHANCE = random.Random(7)


def replica(name: str, in_flight: int = 0, state: EngineState = EngineState.READY) -> Replica:
    return Replica(FakeEngine(name, state), served_name="demo", in_flight=in_flight)


def replicas(count: int) -> list[Replica]:
    return [replica(f"demo-{number}") for number in range(count)]


def session(number: int) -> FakeHints:
    return FakeHints(session_key=b"session %d" % number)


def text(blocks: float) -> bytes:
    """Return a random piece of a prompt."""
    return CHANCE.randbytes(int(blocks * BLOCK_BYTES))


def chosen(policy: SelectionPolicy, candidates: Sequence[Replica], hints: FakeHints) -> Replica:
    one = policy.choose(candidates, hints)
    assert one is not None
    return one


@pytest.mark.parametrize("made", POLICIES)
class TestBoth:
    def test_no_candidate_means_no_choice(self, made: type[SelectionPolicy]) -> None:
        assert made().choose([], FakeHints()) is None

    @pytest.mark.parametrize("state", EngineState)
    def test_an_only_candidate_is_chosen_in_any_state(
        self, made: type[SelectionPolicy], state: EngineState
    ) -> None:
        only = replica("only", 99, state)
        assert made().choose([only], FakeHints(b"s", text(3))) is only

    @pytest.mark.parametrize("state", NOT_READY)
    def test_replica_that_is_not_ready_comes_last(
        self, made: type[SelectionPolicy], state: EngineState
    ) -> None:
        down, busy = replica("down", 0, state), replica("busy", 50)
        for number in range(20):
            hints = FakeHints(b"%d" % number, text(2))
            assert made().choose([down, busy], hints) is busy

    def test_without_a_ready_replica_another_is_chosen(self, made: type[SelectionPolicy]) -> None:
        down = [replica(name, state=EngineState.FAILED) for name in "ab"]
        assert made().choose(down, FakeHints(b"s", text(3))) in down

    def test_equal_hints_stay_on_one_replica_within_the_load_bound(
        self, made: type[SelectionPolicy]
    ) -> None:
        candidates, policy = replicas(5), made()
        hints = FakeHints(b"s", text(4))
        assert len({id(policy.choose(candidates, hints)) for _ in range(20)}) == 1

    def test_concurrent_requests_of_one_session_spread(self, made: type[SelectionPolicy]) -> None:
        candidates, policy = replicas(4), made()
        hints = FakeHints(b"s", text(4))
        for _ in range(400):
            chosen(policy, candidates, hints).in_flight += 1
        assert max(one.in_flight for one in candidates) <= 100 * MAX_LOAD_RATIO + LOAD_SLACK + 1
        assert all(one.in_flight for one in candidates)

    def test_retries_reach_every_replica_once(self, made: type[SelectionPolicy]) -> None:
        candidates, policy = replicas(3), made()
        hints = FakeHints(b"s", text(4))
        left = list(candidates)
        while (one := policy.choose(left, hints)) is not None:
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
    def test_chosen_replica_is_within_the_load_bound(
        self,
        made: type[SelectionPolicy],
        loads: list[tuple[int, EngineState]],
        asker: bytes,
        prompt: bytes,
    ) -> None:
        candidates = [replica(str(n), load, state) for n, (load, state) in enumerate(loads)]
        one = chosen(made(), candidates, FakeHints(asker, prompt * 60))
        ready = [r for r in candidates if r.engine.state is EngineState.READY] or candidates
        assert one in ready
        assert (
            one.in_flight
            < MAX_LOAD_RATIO * sum(r.in_flight for r in ready) / len(ready) + LOAD_SLACK
        )
        assert [r.in_flight for r in candidates] == [load for load, _ in loads]


class TestLoadBound:
    def test_few_requests_may_stay_on_one_replica(self) -> None:
        one, other = replica("one", LOAD_SLACK), replica("other")
        assert within_load_bound([one, other]) == [one, other]

    def test_overloaded_replica_is_skipped(self) -> None:
        one, other = replica("one", 100), replica("other", 40)
        assert within_load_bound([one, other]) == [other]

    @given(st.lists(st.integers(0, 10_000), min_size=1, max_size=10))
    @settings(max_examples=100, deadline=None)
    def test_least_loaded_replica_is_always_within_the_bound(self, loads: list[int]) -> None:
        candidates = [replica(str(n), load) for n, load in enumerate(loads)]
        assert min(candidates, key=lambda r: r.in_flight) in within_load_bound(candidates)


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

    def test_sessions_hash_as_in_earlier_versions(self) -> None:
        """A rolling update runs two versions at once and must not move sessions."""
        names = [chosen(SessionAffinity(), replicas(4), session(n)).engine.name for n in range(8)]
        assert [int(name[-1]) for name in names] == [1, 3, 3, 0, 3, 3, 1, 2]

    @given(count=st.integers(2, 8), gone=st.integers(0, 7))
    @settings(max_examples=20, deadline=None)
    def test_only_the_sessions_of_a_lost_replica_move_and_they_return_with_it(
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

    def test_sessions_of_a_lost_replica_spread_over_the_others(self) -> None:
        policy, candidates = SessionAffinity(), replicas(5)
        moved = [n for n in range(2000) if chosen(policy, candidates, session(n)) is candidates[0]]
        counts = Counter(chosen(policy, candidates[1:], session(n)).engine.name for n in moved)
        assert len(counts) == 4
        assert max(counts.values()) < 2 * min(counts.values())


class TestPrefix:
    def test_growing_conversation_stays_on_its_replica(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(4)
        prompt = text(2)
        first = chosen(policy, candidates, FakeHints(text=prompt))
        for _ in range(20):
            prompt += text(0.7)
            assert chosen(policy, candidates, FakeHints(text=prompt)) is first

    def test_longest_known_prefix_wins(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        system = text(3)
        here, there = system + text(3), system + text(3)
        first = chosen(policy, candidates, FakeHints(text=here))
        first.in_flight += 40
        second = chosen(policy, candidates, FakeHints(text=there))
        assert second is not first
        first.in_flight -= 40
        for _ in range(4):
            assert chosen(policy, candidates, FakeHints(text=here + text(1))) is first
            assert chosen(policy, candidates, FakeHints(text=there + text(1))) is second

    def test_replicas_with_the_same_prefix_share_new_prompts(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        system = text(4)
        for one in candidates:  # each gets the prompt while the other is busy
            other = next(r for r in candidates if r is not one)
            other.in_flight += 40
            assert chosen(policy, candidates, FakeHints(text=system)) is one
            other.in_flight -= 40
        counts: Counter[str] = Counter()
        for _ in range(20):
            counts[chosen(policy, candidates, FakeHints(text=system + text(2))).engine.name] += 1
        assert set(counts.values()) == {10}

    def test_engines_that_left_are_forgotten(self) -> None:
        policy, stays = PrefixAffinity(), replica("stays")
        system = text(4)
        for number in range(5 * MIN_KNOWN_ENGINES):
            pair = [stays, replica(f"pod-{number}")]
            chosen(policy, pair, FakeHints(text=text(2)))
            assert len(policy._bits) <= MIN_KNOWN_ENGINES
            assert len(set(policy._bits.values())) == len(policy._bits)
        assert max(policy._known.values()) < 1 << MIN_KNOWN_ENGINES
        first = chosen(policy, pair, FakeHints(text=system))
        assert chosen(policy, pair, FakeHints(text=system + text(1))) is first

    def test_new_prompts_spread_and_every_gateway_agrees(self) -> None:
        counts: Counter[str] = Counter()
        for _ in range(400):
            hints = FakeHints(text=text(2))
            names = {chosen(PrefixAffinity(), replicas(4), hints).engine.name for _ in range(2)}
            assert len(names) == 1
            counts.update(names)
        assert len(counts) == 4
        assert min(counts.values()) > 60

    def test_prompts_below_one_block_go_to_the_least_loaded(self) -> None:
        policy, candidates = PrefixAffinity(), [replica("busy", 1), replica("idle")]
        for _ in range(4):
            assert chosen(policy, candidates, FakeHints(text=text(0.9))).engine.name == "idle"
        assert len(policy) == 0

    def test_index_is_bounded_and_evicts_the_least_recently_used(self) -> None:
        policy, candidates = PrefixAffinity(max_known=100), replicas(3)
        hot = FakeHints(text=text(10))
        first = chosen(policy, candidates, hot)
        for _ in range(200):
            chosen(policy, candidates, FakeHints(text=text(10)))
            assert len(policy) <= 100
            assert chosen(policy, candidates, hot) is first

    def test_end_of_a_prompt_is_evicted_before_its_prefix(self) -> None:
        policy, candidates = PrefixAffinity(max_known=4), replicas(4)
        prompt = text(4)
        first = chosen(policy, candidates, FakeHints(text=prompt))
        for other in candidates:  # the next prompt goes elsewhere and evicts two blocks
            other.in_flight = 40 if other is first else 0
        chosen(policy, candidates, FakeHints(text=text(2)))
        first.in_flight = 0
        assert chosen(policy, candidates, FakeHints(text=prompt)) is first

    def test_new_replica_gets_requests(self) -> None:
        policy, candidates = PrefixAffinity(), replicas(2)
        system = text(4)
        for one in candidates:
            one.in_flight = 20
        chosen(policy, candidates, FakeHints(text=system))
        new = replica("new")
        assert chosen(policy, [*candidates, new], FakeHints(text=system + text(1))) is new

    @given(st.binary(max_size=3 * BLOCK_BYTES), st.binary(max_size=3 * BLOCK_BYTES))
    @settings(max_examples=50, deadline=None)
    def test_checksums_agree_as_far_as_whole_blocks_do(self, one: bytes, two: bytes) -> None:
        same = 0
        limit = min(len(one), len(two))
        while same < limit and one[same] == two[same]:
            same += 1
        pairs = zip(block_checksums(one), block_checksums(two), strict=False)
        assert sum(a == b for a, b in pairs) == same // BLOCK_BYTES

    def test_only_the_first_blocks_of_a_long_prompt_count(self) -> None:
        policy = PrefixAffinity()
        policy.choose(replicas(2), FakeHints(text=text(MAX_PROMPT_BLOCKS * 2)))
        assert len(policy) == MAX_PROMPT_BLOCKS
