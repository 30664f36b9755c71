"""Which engines can go on with each other's streams."""

from dataclasses import replace
from typing import Any

import pytest

from app.continuation import compatible
from engines.base import EngineFacts

FACTS = EngineFacts(
    version="0.32.0", model="m", max_model_len=2048, dtype="bfloat16", quantization="fp8"
)


def test_equal_engines_are_compatible() -> None:
    assert compatible(FACTS, FACTS)


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
    assert not compatible(FACTS, replace(FACTS, **other))
    assert not compatible(replace(FACTS, **other), FACTS)


@pytest.mark.parametrize("unknown", ["model", "max_model_len", "dtype", "quantization"])
def test_fact_that_one_engine_does_not_report_is_not_compared(unknown: str) -> None:
    assert compatible(FACTS, replace(FACTS, **{unknown: None}))
    assert compatible(replace(FACTS, **{unknown: None}), FACTS)


def test_two_unknown_versions_are_not_the_same() -> None:
    assert not compatible(EngineFacts(), EngineFacts())


@pytest.mark.parametrize(
    "other",
    [{"kv_cache_gib": 2.0}, {"tensor_parallel_size": 2}, {"init_s": 3.0}, {"max_concurrency": 7.0}],
)
def test_facts_of_speed_and_size_may_differ(other: dict[str, Any]) -> None:
    assert compatible(FACTS, replace(FACTS, **other))
