"""Defaults of a batch on a CPU."""

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
        monkeypatch.setenv(name, "of the test")  # restored at the end of the test
        monkeypatch.delenv(name)
    (tmp_path / "node0").mkdir()
    monkeypatch.setattr(worker, "NUMA_NODES", tmp_path)
    return tmp_path


def started(
    *engine: tuple[str, str], prompts: int = 1, kv_cache: int | None = None, **sampling: Any
) -> bool | None:
    """Return whether the engine is eager; None: vLLM's default."""
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


def test_small_batch_is_eager_and_in_one_process() -> None:
    assert started() is True
    assert (os.environ[MULTIPROCESSING], os.environ[KV_CACHE]) == ("0", "4")


@pytest.mark.parametrize(
    "flag", ["enforce-eager", "enforce_eager", "compilation-config.mode", "optimization_level"]
)
def test_compilation_flags_override_the_default(flag: str) -> None:
    assert started((flag, "0")) is None


def test_large_batch_has_separate_processes() -> None:
    started(prompts=FEW_ANSWERS // 2 + 1, n=2)
    assert MULTIPROCESSING not in os.environ
    started(prompts=FEW_ANSWERS // 2, n=2)
    assert os.environ[MULTIPROCESSING] == "0"


def test_engine_has_its_own_process_across_numa_nodes(numa: Path) -> None:
    (numa / "node1").mkdir()
    started()
    assert MULTIPROCESSING not in os.environ


def test_environment_overrides_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MULTIPROCESSING, "1")
    monkeypatch.setenv(KV_CACHE, "9")
    started()
    assert (os.environ[MULTIPROCESSING], os.environ[KV_CACHE]) == ("1", "9")


def test_memory_flag_overrides_the_default() -> None:
    started(kv_cache=1 << 30)
    started(("gpu-memory-utilization", "0.5"))
    assert KV_CACHE not in os.environ
