"""Memory measured by the real nvidia-ml-py with a fake driver, and of real processes."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.gpu.accelerator import (
    NO_USAGE,
    TOLERANCE_GIB,
    AcceleratorError,
    GpuMemory,
    HostMemory,
    Usage,
    find_accelerator,
    unreleased_gib,
    wait_until_released,
)
from tests.fakes import nvml
from tests.fakes.nvml import Driver

NOT_SUPPORTED, NO_PERMISSION, GPU_IS_LOST, MISMATCH = 3, 4, 15, 18
OURS, OTHER = 4711, 815


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Two idle GPUs."""
    nvml.load(library)
    driver = Driver(tmp_path / "nvml")
    monkeypatch.setenv("FAKE_NVML", str(driver.file))
    driver.write()
    return driver


@pytest.fixture
def gpus(driver: Driver) -> GpuMemory:
    return opened(host_pids=True)


@pytest.fixture
def contained(driver: Driver) -> GpuMemory:
    """The same in a container, where the driver's PIDs are not ours."""
    return opened(host_pids=False)


def opened(*, host_pids: bool) -> GpuMemory:
    pynvml.nvmlInit()
    return GpuMemory(pynvml, host_pids=host_pids)


class TestFinding:
    def test_gpus_are_found_with_their_properties(self, driver: Driver) -> None:
        driver.used[1] = 20.0
        driver.mig = {1}
        driver.write()
        found = find_accelerator()
        assert isinstance(found, GpuMemory)
        first, second = found.devices()
        assert (first.index, first.uuid, first.name) == (0, "GPU-00000000", driver.name)
        assert (first.total_gib, first.free_gib, first.mig) == (80.0, 79.5, False)
        assert (second.index, second.free_gib, second.mig) == (1, 60.0, True)

    def test_broken_driver_is_logged_and_host_memory_is_used(
        self, driver: Driver, caplog: pytest.LogCaptureFixture
    ) -> None:
        driver.faults = [("nvmlInit", -1, MISMATCH)]
        driver.write()
        assert isinstance(find_accelerator(), HostMemory)
        [line] = caplog.messages
        assert line.startswith("no GPU can be used: NVML: ")
        assert "mismatch" in line

    @pytest.mark.slow
    def test_missing_driver_is_host_memory_without_output(self) -> None:
        code = """
import ctypes
try:
    ctypes.CDLL("libnvidia-ml.so.1")
except OSError:
    print(type(find_accelerator()).__name__)
"""
        if not (said := in_a_new_process(code)):
            pytest.skip("this machine has NVIDIA's library")
        assert said == "HostMemory\n"

    @pytest.mark.slow
    def test_older_driver_uses_the_older_process_list(self, tmp_path: Path) -> None:
        nvml.library(tmp_path, "OLD_DRIVER")
        driver = Driver(tmp_path / "nvml", processes=[(1, OURS, 2.0)])
        driver.write()
        environment = {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_NVML": str(driver.file)}
        code = "print(dict(find_accelerator().usage().processes))"
        assert in_a_new_process(code, **environment) == f"{{0: {{}}, 1: {{{OURS}: 2.0}}}}\n"

    def test_lost_gpu_is_ignored_and_logged(
        self, driver: Driver, gpus: GpuMemory, caplog: pytest.LogCaptureFixture
    ) -> None:
        driver.faults = [("nvmlDeviceGetUUID", 0, GPU_IS_LOST)]
        driver.write()
        assert [device.index for device in gpus.devices()] == [1]
        [line] = caplog.messages
        assert line.startswith("GPU 0 ignored: NVML: ")

    def test_memory_shared_with_the_host_is_unknown(self, driver: Driver, gpus: GpuMemory) -> None:
        driver.faults = [("nvmlDeviceGetMemoryInfo", 0, NOT_SUPPORTED)]
        driver.write()
        first, second = gpus.devices()
        assert (first.total_gib, first.free_gib) == (None, None)
        assert second.total_gib == 80.0
        assert set(gpus.usage().used_gib) == {1}


class TestGpuMemory:
    def test_memory_of_processes_is_summed_over_gpus(self, driver: Driver, gpus: GpuMemory) -> None:
        driver.processes = [(0, OURS, 10.0), (1, OURS, 5.0), (1, OURS + 1, 1.0), (0, OTHER, 7.0)]
        driver.write()
        assert gpus.used_gib({OURS, OURS + 1}) == 16.0
        assert gpus.used_gib(()) == 0.0

    def test_memory_of_processes_is_unknown_in_a_container(
        self, driver: Driver, contained: GpuMemory
    ) -> None:
        driver.processes = [(0, OURS, 10.0)]
        driver.write()
        assert contained.used_gib({OURS}) is None

    @pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION])
    def test_usage_counts_if_the_driver_lists_no_processes(
        self, driver: Driver, gpus: GpuMemory, code: int
    ) -> None:
        before = gpus.usage()
        driver.faults = [("nvmlDeviceGetComputeRunningProcesses", -1, code)]
        driver.used[0] += 30.0
        driver.write()
        assert gpus.used_gib({OURS}) == 0.0
        assert gpus.unreleased_gib({OURS}, before) == 30.0

    def test_usage_counts_if_a_process_has_unknown_memory(
        self, driver: Driver, gpus: GpuMemory
    ) -> None:
        before = gpus.usage()
        driver.processes = [(0, OURS, None)]
        driver.used[0] += 30.0
        driver.write()
        assert gpus.unreleased_gib({OURS}, before) == 30.0

    def test_only_the_gpus_of_the_engine_are_measured(
        self, driver: Driver, gpus: GpuMemory
    ) -> None:
        before = gpus.usage({1})
        driver.faults = [("nvmlDeviceGetMemoryInfo", 0, GPU_IS_LOST)]
        driver.write()
        assert gpus.unreleased_gib({OURS}, before, {1}) == 0.0
        with pytest.raises(AcceleratorError, match=r"^NVML: .*\w.*$"):
            gpus.unreleased_gib({OURS}, before)

    def test_memory_of_another_engine_is_subtracted(
        self, driver: Driver, gpus: GpuMemory, contained: GpuMemory
    ) -> None:
        before = gpus.usage()
        driver.used[0] += 40.0
        driver.processes = [(0, OTHER, 40.0)]
        driver.write()
        assert gpus.unreleased_gib({OURS}, before) == 0.0
        # Its owner is unknown here, so it is included.
        assert contained.unreleased_gib({OURS}, before) == 40.0

    def test_equal_pid_of_another_process_does_not_count_in_a_container(
        self, driver: Driver, contained: GpuMemory
    ) -> None:
        driver.processes = [(0, OURS, 10.0)]
        driver.used[0] = 10.5
        driver.write()
        before = contained.usage()
        assert contained.unreleased_gib({OURS}, before) == 0.0

    def test_memory_without_a_listed_process_counts(
        self, driver: Driver, gpus: GpuMemory, contained: GpuMemory
    ) -> None:
        before = gpus.usage()
        driver.used[1] += 3.0
        driver.write()
        assert gpus.unreleased_gib({OURS}, before) == 3.0
        assert contained.unreleased_gib({OURS}, before) == 3.0

    def test_container_without_a_baseline_is_an_error(
        self, gpus: GpuMemory, contained: GpuMemory
    ) -> None:
        assert gpus.unreleased_gib({OURS}, NO_USAGE) == 0.0
        with pytest.raises(AcceleratorError, match="PIDs are not ours"):
            contained.unreleased_gib({OURS}, NO_USAGE)


class TestWaiting:
    async def test_wait_returns_at_once_if_memory_is_free(self, gpus: GpuMemory) -> None:
        assert await wait_until_released(gpus, {OURS}, gpus.usage(), timeout_s=60) == 0.0

    async def test_wait_ends_when_the_memory_is_released(
        self, driver: Driver, gpus: GpuMemory
    ) -> None:
        before = gpus.usage()
        driver.used[0] = 70.0
        driver.processes = [(0, OURS, 69.5)]
        driver.write()
        waiting = asyncio.create_task(wait_until_released(gpus, {OURS}, before, timeout_s=60))
        await asyncio.sleep(0)
        driver.used[0] = 0.5
        driver.processes = []
        driver.write()
        assert await waiting == 0.0

    async def test_wait_returns_what_is_not_released_in_time(
        self, driver: Driver, gpus: GpuMemory
    ) -> None:
        before = gpus.usage()
        driver.processes = [(0, OURS, 12.0)]
        driver.write()
        assert await wait_until_released(gpus, {OURS}, before, timeout_s=0.2) == 12.0

    async def test_wait_ends_with_unknown_if_the_driver_fails(
        self, driver: Driver, gpus: GpuMemory, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = gpus.usage()
        driver.faults = [("nvmlDeviceGetMemoryInfo", -1, GPU_IS_LOST)]
        driver.write()
        assert await wait_until_released(gpus, {OURS}, before, timeout_s=60) is None
        [line] = caplog.messages
        assert line.startswith("cannot measure GPU memory: NVML: ")

    async def test_hanging_driver_blocks_neither_the_loop_nor_the_caller(
        self, driver: Driver, gpus: GpuMemory
    ) -> None:
        before = gpus.usage()
        driver.hangs = ["nvmlDeviceGetMemoryInfo"]
        driver.write()
        assert await wait_until_released(gpus, {OURS}, before, timeout_s=0.02) is None
        driver.hangs = []
        driver.write()
        for thread in threading.enumerate():
            if thread.name == "measure memory":
                thread.join()


class TestHostMemory:
    @pytest.fixture
    def child(self) -> Iterator[subprocess.Popen[bytes]]:
        """A process that holds 200 MB."""
        code = "held = b'x' * 200_000_000; print(flush=True); input()"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
            process.kill()

    @pytest.mark.slow
    async def test_memory_of_a_process_is_released_when_it_is_killed(
        self, child: subprocess.Popen[bytes]
    ) -> None:
        memory = HostMemory()
        held = memory.used_gib({child.pid})
        assert 0.18 < held < 0.25
        left = await wait_until_released(memory, {child.pid}, NO_USAGE, timeout_s=1)
        assert left == pytest.approx(held, rel=0.1)
        child.kill()
        assert await wait_until_released(memory, {child.pid}, NO_USAGE, timeout_s=20) == 0.0
        child.wait()
        assert memory.used_gib({child.pid}) == 0.0

    def test_there_are_no_gpus(self) -> None:
        assert HostMemory().devices() == ()
        assert HostMemory().usage() == NO_USAGE

    def test_shared_memory_counts_once(self) -> None:
        ours = HostMemory().used_gib({os.getpid()})
        assert 0 < ours < 16


amounts = st.floats(0, 80, allow_nan=False).map(lambda gib: round(gib, 2))
listings = st.dictionaries(st.integers(1, 6), amounts, max_size=4)


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    """GPUs on which at least as much is in use as the driver lists."""
    processes = draw(st.dictionaries(st.integers(0, 3), listings, max_size=3))
    used = {gpu: sum(listed.values()) + draw(amounts) for gpu, listed in processes.items()}
    return Usage(used, processes)


pids_known = st.none() | st.sets(st.integers(1, 6))


@given(usages(), st.sets(st.integers(7, 9)) | st.none())
def test_unchanged_usage_is_all_released(usage: Usage, pids: set[int] | None) -> None:
    assert unreleased_gib(pids, usage, usage) == 0.0


@given(usages(), listings, amounts, st.sampled_from([True, False]))
def test_memory_of_own_processes_is_never_missed(
    before: Usage, ours: dict[int, float], unlisted: float, known: bool
) -> None:
    pids = {pid + 100 for pid in ours}
    mine = {pid + 100: gib for pid, gib in ours.items()}
    held = sum(mine.values()) + unlisted
    now = Usage(
        {gpu: used + held for gpu, used in before.used_gib.items()},
        {gpu: {**listed, **mine} for gpu, listed in before.processes.items()},
    )
    left = unreleased_gib(pids if known else None, before, now)
    assert left >= len(now.processes) * (held - TOLERANCE_GIB) - 1e-6
    assert left <= len(now.processes) * held + 1e-6


@given(usages(), listings)
def test_changes_by_other_processes_do_not_count(before: Usage, others: dict[int, float]) -> None:
    theirs = {pid + 200: gib for pid, gib in others.items()}
    now = Usage(
        {
            gpu: used - sum(before.processes[gpu].values()) + sum(theirs.values())
            for gpu, used in before.used_gib.items()
        },
        dict.fromkeys(before.processes, theirs),
    )
    assert unreleased_gib({999}, before, now) == 0.0


@given(usages(), usages(), pids_known)
def test_unreleased_memory_is_never_negative(
    before: Usage, now: Usage, pids: set[int] | None
) -> None:
    assert unreleased_gib(pids, before, now) >= 0.0


def in_a_new_process(code: str, **environment: str) -> str:
    """Return the output of code that uses find_accelerator; stderr must be empty."""
    ended = subprocess.run(
        [sys.executable, "-c", f"from engines.gpu.accelerator import find_accelerator\n{code}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stderr == ""
    return ended.stdout
