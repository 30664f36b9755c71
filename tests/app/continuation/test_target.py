"""At which engine an interrupted stream goes on."""

from dataclasses import replace
from typing import Any

import pytest

from app.continuation.target import Origin, choose_target, compatible, may_come
from app.routing import Replica
from engines.base import EngineFacts, EngineState
from tests.app.routing.fakes import FakeEngine

FACTS = EngineFacts(version="0.32.0", model="m")
ALL_FACTS = EngineFacts(
    version="0.32.0", model="m", max_model_len=2048, dtype="bfloat16", quantization="fp8"
)


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


def test_equal_engines_are_compatible() -> None:
    assert compatible(ALL_FACTS, ALL_FACTS)


@pytest.mark.parametrize(
    "other",
    [
        {"version": "0.32.1"},
        {"version": None},
        {"model": "other"},
        {"max_model_len": 4096},
        {"dtype": "float32"},
        {"quantization": "awq"},
    ],
)
def test_engine_with_another_fact_is_not(other: dict[str, Any]) -> None:
    assert not compatible(ALL_FACTS, replace(ALL_FACTS, **other))
    assert not compatible(replace(ALL_FACTS, **other), ALL_FACTS)


@pytest.mark.parametrize("unknown", ["model", "max_model_len", "dtype", "quantization"])
def test_fact_that_one_engine_does_not_report_is_not_compared(unknown: str) -> None:
    assert compatible(ALL_FACTS, replace(ALL_FACTS, **{unknown: None}))
    assert compatible(replace(ALL_FACTS, **{unknown: None}), ALL_FACTS)


def test_two_unknown_versions_are_not_the_same() -> None:
    assert not compatible(EngineFacts(), EngineFacts())


@pytest.mark.parametrize(
    "other",
    [{"kv_cache_gib": 2.0}, {"tensor_parallel_size": 2}, {"init_s": 3.0}, {"max_concurrency": 7.0}],
)
def test_facts_of_speed_and_size_may_differ(other: dict[str, Any]) -> None:
    assert compatible(ALL_FACTS, replace(ALL_FACTS, **other))
