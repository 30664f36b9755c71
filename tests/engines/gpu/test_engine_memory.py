"""An engine's memory is measured while it runs, and released before its next start."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pynvml
import pytest

from engines.gpu import engine_memory
from engines.gpu.accelerator import GpuMemory, HostMemory
from engines.process import run, watchdog
from engines.process.engine import ProcessEngine
from engines.setup import EngineSetup
from engines.spec import ProcessSpec
from tests.engines.processes import LAUNCHER, build, family, ready
from tests.fakes import nvml
from tests.fakes.nvml import Driver
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Two GPUs of which 0.5 GiB are in use."""
    nvml.load(nvml.library(tmp_path))
    driver = Driver(tmp_path / "nvml")
    monkeypatch.setenv("FAKE_NVML", str(driver.file))
    driver.write()
    return driver


@pytest.fixture
async def engine(tmp_path: Path, driver: Driver) -> AsyncIterator[ProcessEngine]:
    """An engine on the first GPU."""
    pynvml.nvmlInit()
    setup = EngineSetup(
        name="demo-0",
        served_name="demo",
        run_dir=tmp_path,
        gpus=(0,),
        accelerator=lambda: GpuMemory(pynvml, host_pids=True),
    )
    one = ProcessEngine(setup, ProcessSpec(kind="process", model="m"), LAUNCHER)
    yield one
    await one.stop(0.0)


async def test_host_memory_of_an_engine_is_measured(tmp_path: Path) -> None:
    engine = build(tmp_path, sleep_level=1)  # the fake holds 256 MiB then
    await ready(engine)
    await wait_until(lambda: (engine.memory_gib or 0.0) > 0.25)
    await engine.stop(0.0)
    assert engine.memory_gib is not None  # what it took when it last ran


async def test_memory_after_a_takeover_includes_all_processes(
    tmp_path: Path,
) -> None:
    old = build(tmp_path, keep=True, args={"fake-children": True})
    await ready(old)
    await wait_until(lambda: old.memory_gib is not None)
    pids = [process.pid for process in family(old)]
    await old.release()
    new = build(tmp_path, keep=True, args={"fake-children": True})
    try:
        await ready(new)
        await wait_until(lambda: new.memory_gib is not None)
        only_server = HostMemory().used_gib([pids[1]])
        assert (new.memory_gib or 0.0) > 1.1 * only_server
    finally:
        await new.stop(0.0)


async def test_declared_memory_is_used(tmp_path: Path) -> None:
    engine = build(tmp_path, memory_gib=40.0)
    assert engine.memory_gib == 40.0
    await ready(engine)
    await engine.stop(0.0)
    assert engine.memory_gib == 40.0


async def test_gpu_memory_of_its_processes_is_measured(
    engine: ProcessEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SAMPLES_PER_MEASUREMENT", 1)
    monkeypatch.setattr(watchdog, "SAMPLE_S", 0.05)
    await ready(engine)
    driver.used[0] = 40.5
    driver.processes = [(0, family(engine)[1].pid, 40.0)]
    driver.write()
    await wait_until(lambda: engine.memory_gib == 40.0)
    driver.used[0], driver.processes = 0.5, []
    driver.write()


async def test_unreleased_gpu_memory_is_logged(
    engine: ProcessEngine,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine_memory, "RELEASE_TIMEOUT_S", 0.2)
    await ready(engine)
    driver.used[0] = 30.5  # and no process that has it
    driver.write()
    with caplog.at_level(logging.ERROR):
        await engine.stop(0.0)
    assert "30.0 GiB are not released after 0.2 s" in caplog.text


async def test_gpu_memory_released_in_time_is_not_logged(
    engine: ProcessEngine, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    await ready(engine)
    with caplog.at_level(logging.WARNING):
        await engine.stop(0.0)
    assert caplog.text == ""
