"""The plan of an engine on a CPU, whose KV cache has the size that vLLM's CPU build gives it."""

import pytest

from engines.demo.model import WEIGHTS
from engines.plan.engine_memory import CPU_CACHE, engine_memory
from engines.spec import ProcessSpec

FLAG = "kv-cache-memory-bytes"
QUARTER = "capacity: 174,720 tokens, 85.31 requests of 2,048 tokens at once"
WHOLE = "capacity: 699,008 tokens, 341.31 requests of 2,048 tokens at once"


@pytest.mark.parametrize(
    ("args", "env", "capacity"),
    [
        ({FLAG: "256M"}, {}, QUARTER),
        ({}, {CPU_CACHE: "1"}, WHOLE),
        ({FLAG: "256M"}, {CPU_CACHE: "1"}, WHOLE),
        ({FLAG: "256M"}, {CPU_CACHE: ""}, QUARTER),
    ],
    ids=["flag", "variable", "variable first", "empty variable"],
)
def test_cache_has_the_size_that_vllm_logs(
    args: dict[str, str], env: dict[str, str], capacity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CPU_CACHE, raising=False)
    flags = {"max-model-len": 2048, **args}
    spec = ProcessSpec(kind="process", model=str(WEIGHTS), args=flags, env=env)
    assert list(engine_memory(spec, lambda: None, lambda: True))[-1] == capacity


def test_nothing_is_said_of_a_cache_whose_size_vllm_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CPU_CACHE, raising=False)
    spec = ProcessSpec(kind="process", model=str(WEIGHTS))
    assert not any("capacity" in line for line in engine_memory(spec, lambda: None, lambda: True))


def test_blocks_of_an_unknown_gpu_are_not_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CPU_CACHE, raising=False)
    flags = {"max-model-len": 2048, FLAG: "256M"}
    spec = ProcessSpec(kind="process", model=str(WEIGHTS), args=flags)
    assert list(engine_memory(spec, lambda: None, lambda: False))[-1] != QUARTER
