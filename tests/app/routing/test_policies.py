"""The least-loaded and round-robin policies, and the table of all policies."""

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.routing import POLICIES, Replica
from app.routing.least_loaded import LeastLoaded
from app.routing.policies import RoundRobin
from app.routing.selection import MIN_KNOWN_ENGINES, max_known_engines
from app.settings import ModelSettings
from engines.base import EngineState
from tests.app.routing.fakes import FakeEngine, FakeHints

NO_HINTS = FakeHints()
NOT_READY = [state for state in EngineState if state is not EngineState.READY]


def replica(name: str = "a", in_flight: int = 0, state: EngineState = EngineState.READY) -> Replica:
    return Replica(FakeEngine(name, state), served_name="demo", in_flight=in_flight)


def test_every_configurable_policy_is_in_the_table() -> None:
    assert set(POLICIES) == set(get_args(ModelSettings.model_fields["policy"].annotation))


def test_no_candidate_means_no_choice() -> None:
    assert LeastLoaded().choose([], NO_HINTS) is None


@pytest.mark.parametrize("state", EngineState)
def test_an_only_candidate_is_chosen_in_any_state(state: EngineState) -> None:
    only = replica(state=state, in_flight=99)
    assert LeastLoaded().choose([only], NO_HINTS) is only


@pytest.mark.parametrize("state", NOT_READY)
def test_busy_ready_replica_comes_before_idle_one_that_is_not_ready(state: EngineState) -> None:
    busy, idle = replica("busy", in_flight=50), replica("idle", state=state)
    policy = LeastLoaded()
    for candidates in ([busy, idle], [idle, busy]):
        assert all(policy.choose(candidates, NO_HINTS) is busy for _ in range(4))


def test_replica_with_the_fewest_in_flight_is_chosen() -> None:
    few, many, most = replica("few", 1), replica("many", 2), replica("most", 3)
    policy = LeastLoaded()
    for candidates in ([few, many, most], [most, many, few], [many, few, most]):
        assert all(policy.choose(candidates, NO_HINTS) is few for _ in range(6))


def test_without_a_ready_replica_the_least_loaded_is_chosen() -> None:
    failed = replica("failed", 1, EngineState.FAILED)
    starting = replica("starting", 0, EngineState.STARTING)
    policy = LeastLoaded()
    assert all(policy.choose([failed, starting], NO_HINTS) is starting for _ in range(4))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_ties_take_turns_evenly(count: int) -> None:
    candidates = [replica(str(number)) for number in range(count)]
    policy = LeastLoaded()
    chosen = [policy.choose(candidates, NO_HINTS) for _ in range(count * 4)]
    assert Counter(map(id, chosen)) == {id(one): 4 for one in candidates}
    for start in range(0, count * 4, count):
        assert len({id(one) for one in chosen[start : start + count]}) == count


def test_ties_take_turns_among_busier_replicas() -> None:
    busy, first, second = replica("busy", 5), replica("first"), replica("second")
    policy = LeastLoaded()
    chosen = Counter(
        one.engine.name
        for _ in range(30)
        if (one := policy.choose([busy, first, second], NO_HINTS))
    )
    assert set(chosen) == {"first", "second"}
    assert min(chosen.values()) >= 10


def test_retries_do_not_starve_a_tied_replica() -> None:
    """A retry chooses without the replica that failed; the turns of the others go on."""
    candidates = [replica(name) for name in "abc"]
    policy = LeastLoaded()
    chosen: Counter[str] = Counter()
    for _ in range(60):
        first = policy.choose(candidates, NO_HINTS)
        assert first is not None
        second = policy.choose([one for one in candidates if one is not first], NO_HINTS)
        assert second is not None
        chosen[first.engine.name] += 1
    assert set(chosen) == set("abc")


def test_long_requests_spread_evenly() -> None:
    candidates = [replica(str(number)) for number in range(4)]
    policy = LeastLoaded()
    for _ in range(42):
        one = policy.choose(candidates, NO_HINTS)
        assert one is not None
        one.in_flight += 1
    loads = [one.in_flight for one in candidates]
    assert max(loads) - min(loads) == 1


def test_policies_do_not_share_turns() -> None:
    candidates = [replica("a"), replica("b")]
    first, second = LeastLoaded(), LeastLoaded()
    for _ in range(4):
        assert first.choose(candidates, NO_HINTS) is second.choose(candidates, NO_HINTS)


@given(
    loads=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(list(EngineState))), min_size=1, max_size=8
    ),
    turns=st.integers(0, 20),
)
@settings(max_examples=100, deadline=None)
def test_no_better_candidate_is_skipped(loads: list[tuple[int, EngineState]], turns: int) -> None:
    candidates = [replica(str(n), load, state) for n, (load, state) in enumerate(loads)]
    policy = LeastLoaded()
    for _ in range(turns):
        policy.choose(candidates, NO_HINTS)
    chosen = policy.choose(candidates, NO_HINTS)
    assert chosen is not None
    for other in candidates:
        if other.engine.state is EngineState.READY:
            assert chosen.engine.state is EngineState.READY
            assert chosen.in_flight <= other.in_flight
    assert [one.in_flight for one in candidates] == [load for load, _ in loads]


class TestRoundRobin:
    def test_no_candidate_means_no_choice(self) -> None:
        assert RoundRobin().choose([], NO_HINTS) is None

    def test_turns_do_not_depend_on_load(self) -> None:
        candidates = [replica("busy", 50), replica("idle"), replica("third", 3)]
        policy = RoundRobin()
        chosen = [policy.choose(candidates, NO_HINTS) for _ in range(9)]
        assert chosen[:3] == chosen[3:6] == chosen[6:]
        assert {id(one) for one in chosen[:3]} == {id(one) for one in candidates}

    @pytest.mark.parametrize("state", NOT_READY)
    def test_turns_of_a_replica_that_is_not_ready_go_to_the_others_evenly(
        self, state: EngineState
    ) -> None:
        down = replica("down", state=state)
        candidates = [replica("a"), down, replica("b"), replica("c")]
        policy = RoundRobin()
        chosen = Counter(
            one.engine.name for _ in range(30) if (one := policy.choose(candidates, NO_HINTS))
        )
        assert chosen == {"a": 10, "b": 10, "c": 10}
        assert policy.choose([down], NO_HINTS) is down

    def test_retry_counts_as_a_turn(self) -> None:
        candidates = [replica(name) for name in "abc"]
        policy = RoundRobin()
        chosen: Counter[str] = Counter()
        for _ in range(30):
            first = policy.choose(candidates, NO_HINTS)
            assert first is not None
            again = policy.choose([one for one in candidates if one is not first], NO_HINTS)
            assert again is not None
            chosen.update([first.engine.name, again.engine.name])
        assert chosen == {"a": 20, "b": 20, "c": 20}

    @given(
        ups=st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=40),
        last=st.integers(1, 20),
    )
    @settings(max_examples=100, deadline=None)
    def test_turns_are_even_after_replicas_came_and_went(
        self, ups: list[set[int]], last: int
    ) -> None:
        candidates = [replica(str(number)) for number in range(5)]
        policy = RoundRobin()
        for up in ups:
            policy.choose([candidates[number] for number in sorted(up)], NO_HINTS)
        chosen = Counter(
            one.engine.name for _ in range(last) if (one := policy.choose(candidates, NO_HINTS))
        )
        assert max(chosen.values()) - min(chosen[str(n)] for n in range(5)) <= 1


def test_round_robin_forgets_engines_that_left() -> None:
    policy = RoundRobin()
    stays = replica("stays")
    for number in range(5 * MIN_KNOWN_ENGINES):
        pair = [stays, replica(f"pod-{number}")]
        # Each of the two gets its turn, however many there were before.
        assert {policy.choose(pair, NO_HINTS) for _ in pair} == set(pair)
        assert len(policy._turns) <= max_known_engines(pair)
