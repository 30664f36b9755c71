"""Plans of published models beside the figures of vLLM's own start-up logs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.plan import MemoryPlan, PlanOptions, plan_memory, read_model_files
from tests.engines.plan.checkpoints import published

GIB = 2**30
# The logs have GiB with two decimals, and vLLM's own tables and workspaces beside the weights.
CLOSE, WEIGHTS_CLOSE = 0.05, 1.0


def planned(name: str, directory: Path, **options: Any) -> MemoryPlan:
    return plan_memory(read_model_files(str(published(name, directory))), PlanOptions(**options))


def difference(computed: float, logged: float) -> float:
    return (computed / logged - 1) * 100


@pytest.mark.parametrize(
    ("model", "gib", "logged"),
    [
        ("qwen2.5-32b", 11.89, 48_704),
        ("qwen2.5-7b", 12.80, 239_744),
        ("qwen3-4b", 12.51, 91_088),
        ("gpt-oss-20b", 36.56, 798_624),
        ("gemma-4-26b-a4b", 24.45, 106_800),
    ],
)
def test_tokens_are_those_that_vllm_logged(
    model: str, gib: float, logged: int, tmp_path: Path, show: Callable[[str], None]
) -> None:
    capacity = planned(model, tmp_path, cache_bytes=int(gib * GIB)).capacity
    assert capacity is not None
    computed = capacity.every_layer_tokens
    percent = difference(computed, logged)
    show(f"plan: {model}, {gib} GiB: {computed:,} computed, {logged:,} logged, {percent:+.3f} %")
    assert abs(percent) < CLOSE


@pytest.mark.parametrize(
    ("model", "gib", "length", "logged"),
    [("gemma-4-26b-a4b", 24.45, 262_144, 4.37), ("qwen3-4b", 12.51, 40_960, 2.22)],
)
def test_concurrent_requests_are_those_that_vllm_logged(
    model: str, gib: float, length: int, logged: float, tmp_path: Path, show: Callable[[str], None]
) -> None:
    options = {"cache_bytes": int(gib * GIB), "max_model_len": length, "in_flight_tokens": 2048}
    capacity = planned(model, tmp_path, **options).capacity
    assert capacity is not None
    show(
        f"plan: {model}, {gib} GiB, {length:,} tokens each: {capacity.concurrency:.3f} requests "
        f"computed, {logged} logged"
    )
    assert capacity.concurrency == pytest.approx(logged, abs=0.005)


@pytest.mark.parametrize(
    ("model", "quantization", "logged"),
    [
        ("qwen3-4b", None, 7.555),
        ("qwen2.5-32b", None, 61.06),
        ("gpt-oss-20b", None, 13.72),
        ("gemma-4-26b-a4b", None, 48.5),
        ("gemma-4-26b-a4b", "fp8", 25.7),
        ("gemma-4-31b", None, 58.9),
    ],
)
def test_weights_are_as_large_as_vllm_logged(
    model: str,
    quantization: str | None,
    logged: float,
    tmp_path: Path,
    show: Callable[[str], None],
) -> None:
    plan = planned(model, tmp_path, quantization=quantization)
    assert plan.weight_bytes is not None
    computed = plan.weight_bytes / GIB
    percent = difference(computed, logged)
    kind = f" {quantization}" if quantization else ""
    show(f"plan: {model}{kind}: {computed:.2f} GiB computed, {logged} logged, {percent:+.2f} %")
    assert abs(percent) < WEIGHTS_CLOSE
