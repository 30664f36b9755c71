"""The plans of memory on the page of a model."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from app.console import memory_plans
from app.console.memory_plans import MemoryPlans
from app.settings import ModelSettings
from engines.gpu import AssumedGpus, Device
from tests.engines.plan.checkpoints import published


def settings(*engines: Mapping[str, object]) -> ModelSettings:
    return ModelSettings.model_validate({"name": "m", "engines": list(engines)})


def gpus() -> Sequence[Device]:
    return AssumedGpus(1, 24.0).devices()


async def test_replicas_share_a_plan_and_others_have_their_own(tmp_path: Path) -> None:
    local = {"kind": "process", "model": str(published("qwen3-4b", tmp_path))}
    short = {**local, "args": {"max-model-len": 8000}}
    away = {"kind": "remote", "url": "http://127.0.0.1:1"}
    plans = MemoryPlans(gpus)
    first, second = await plans.of(settings(local, short, away, local)) or ()
    assert (first.engines, second.engines) == ([0, 3], [1])
    assert first.lines[0].startswith("weights: 7.49 GiB in 1 file")
    assert second.lines[-1].endswith("requests of 8,000 tokens at once")
    await plans.aclose()


async def test_a_plan_is_read_once_for_its_settings(tmp_path: Path) -> None:
    asked: list[int] = []

    def devices() -> Sequence[Device]:
        asked.append(1)
        return gpus()

    plans = MemoryPlans(devices)
    local = settings({"kind": "process", "model": str(published("qwen3-4b", tmp_path))})
    assert await plans.of(local) == await plans.of(local)
    assert len(asked) == 1
    await plans.of(local.model_copy())
    assert len(asked) == 2
    await plans.aclose()


async def test_a_page_does_not_wait_for_a_disk_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_plans, "PATIENCE_S", 0.01)
    hangs = threading.Event()

    def devices() -> Sequence[Device]:
        hangs.wait()
        return ()

    plans = MemoryPlans(devices)
    local = settings({"kind": "process", "model": str(tmp_path)})
    assert await plans.of(local) is None
    hangs.set()
    await plans.aclose()
