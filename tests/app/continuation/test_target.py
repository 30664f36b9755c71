"""At which engine an interrupted stream goes on."""

from typing import Any

import pytest

from app.continuation.target import Origin, choose_target, may_come
from app.routing import Replica
from engines.base import EngineFacts, EngineState
from tests.app.routing.fakes import FakeEngine

FACTS = EngineFacts(version="0.32.0", model="m")


def replica(name: str = "demo-0", in_flight: int = 0, **attributes: Any) -> Replica:
    engine = FakeEngine(name, **{"facts": FACTS, **attributes})
    return Replica(engine, "demo", in_flight=in_flight)


def test_ready_engine_with_the_fewest_requests_is_chosen() -> None:
    old, busy, free = replica(), replica("demo-1", 5), replica("demo-2", 2)
    assert choose_target((old, busy, free), Origin.of(old)) is free


def test_engine_is_not_chosen_in_the_life_in_which_it_lost_the_stream() -> None:
    old = replica()
    origin = Origin.of(old)
    assert choose_target((old,), origin) is None
    assert may_come((old,), origin)
    restarted = replica()
    restarted.engine._status.since += 1
    assert choose_target((restarted,), origin) is restarted


def test_released_stream_may_go_on_where_it_was() -> None:
    old = replica()
    assert choose_target((old,), Origin.of(old).released()) is old


@pytest.mark.parametrize(
    "attributes",
    [
        {"state": EngineState.DRAINING},
        {"facts": EngineFacts(version="0.33.0", model="m")},
        {"facts": EngineFacts()},
    ],
)
def test_engine_that_cannot_go_on_is_not_chosen(attributes: dict[str, Any]) -> None:
    assert choose_target((replica("demo-1", **attributes),), Origin.of(replica())) is None
