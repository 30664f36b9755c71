"""The division of the engines' slots between gateways."""

from hypothesis import given
from hypothesis import strategies as st

from app.routing.replica import Replica
from app.routing.slots import count_slots
from engines.base import EngineState
from tests.app.routing.fakes import FakeEngine

READY, FAILED = EngineState.READY, EngineState.FAILED


def replicas(*states: EngineState, division: tuple[int, int] = (1, 0)) -> list[Replica]:
    return [Replica(FakeEngine("e", state), "demo", division=division) for state in states]


def test_a_lone_gateway_has_the_slots_of_every_ready_engine() -> None:
    assert count_slots(replicas(READY, READY, FAILED), 8) == 16


def test_without_a_ready_engine_one_engines_slots_remain() -> None:
    assert count_slots(replicas(FAILED, FAILED), 8) == 8
    assert count_slots(replicas(FAILED, FAILED, division=(2, 0)), 8) == 4
    assert count_slots([], 8) == 1


@given(engines=st.integers(1, 8), per_engine=st.integers(1, 50), gateways=st.integers(1, 12))
def test_gateways_together_have_every_slot_exactly_once(
    engines: int, per_engine: int, gateways: int
) -> None:
    parts = [
        count_slots(replicas(*[READY] * engines, division=(gateways, rank)), per_engine)
        for rank in range(gateways)
    ]
    # With fewer slots than gateways each has one all the same.
    assert sum(parts) == max(engines * per_engine, gateways)
    assert max(parts) - min(parts) <= 1


def test_only_engines_that_others_serve_too_are_divided() -> None:
    own, shared = replicas(READY), replicas(READY, READY, division=(3, 2))
    assert count_slots(own + shared, 4) == 4 + 2  # slots 2 and 5 of 0 to 7
