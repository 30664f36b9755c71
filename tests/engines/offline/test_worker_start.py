"""How vLLM is started for a batch on a CPU, where the user does not say it."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.offline import Job, Prompt, worker
from engines.offline.worker import FEW_ANSWERS, start_quickly

MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
KV_CACHE = "VLLM_CPU_KVCACHE_SPACE"


@pytest.fixture(autouse=True)
def numa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with one NUMA node, and nothing set in the environment."""
    for name in (MULTIPROCESSING, KV_CACHE):
        monkeypatch.setenv(name, "of the test")  # so that it is as before in the end
        monkeypatch.delenv(name)
    (tmp_path / "node0").mkdir()
    monkeypatch.setattr(worker, "NUMA_NODES", tmp_path)
    return tmp_path


def started(
    *engine: tuple[str, str], prompts: int = 1, kv_cache: int | None = None, **sampling: Any
) -> bool | None:
    """Return whether the engine is eager; None: as vLLM has it."""
    engine_args = SimpleNamespace(kv_cache_memory_bytes=kv_cache, enforce_eager=None)
    job = Job(
        model="m",
        engine=engine,
        sampling=sampling,
        prompts=(Prompt("a"),) * prompts,
    )
    start_quickly(engine_args, job)
    eager: bool | None = engine_args.enforce_eager
    return eager


def test_a_small_batch_is_eager_and_in_one_process() -> None:
    assert started() is True
    assert (os.environ[MULTIPROCESSING], os.environ[KV_CACHE]) == ("0", "4")


@pytest.mark.parametrize(
    "flag", ["enforce-eager", "enforce_eager", "compilation-config.mode", "optimization_level"]
)
def test_what_the_user_says_of_compilation_holds(flag: str) -> None:
    assert started((flag, "0")) is None


def test_a_large_batch_has_processes_that_overlap() -> None:
    started(prompts=FEW_ANSWERS // 2 + 1, n=2)
    assert MULTIPROCESSING not in os.environ
    started(prompts=FEW_ANSWERS // 2, n=2)
    assert os.environ[MULTIPROCESSING] == "0"


def test_across_numa_nodes_the_engine_has_a_process_that_can_be_bound(numa: Path) -> None:
    (numa / "node1").mkdir()
    started()
    assert MULTIPROCESSING not in os.environ


def test_the_environment_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MULTIPROCESSING, "1")
    monkeypatch.setenv(KV_CACHE, "9")
    started()
    assert (os.environ[MULTIPROCESSING], os.environ[KV_CACHE]) == ("1", "9")


def test_memory_that_a_flag_sets_is_not_set_again() -> None:
    started(kv_cache=1 << 30)
    started(("gpu-memory-utilization", "0.5"))
    assert KV_CACHE not in os.environ
