"""Measures the memory of engines: GPU memory through NVML where there is a GPU, else the host's.

Every call blocks, and NVML's without a bound: make them off the event loop. `wait_until_released`
does so itself.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

log = logging.getLogger(__name__)

GIB = 1024**3
# The usage of other processes on a GPU, the driver included, varies by this much.
TOLERANCE_GIB = 0.25
FIRST_POLL_S = 0.05
MAX_POLL_S = 0.5
# The initial PID namespace of a machine has this number: PROC_PID_INIT_INO of Linux's proc_ns.h.
HOST_PID_NAMESPACE = f"pid:[{0xEFFFFFFC}]"


class AcceleratorError(Exception):
    """The driver failed; the text is its own message in one line."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; `index` is NVML's, which is CUDA's under CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Memory is None where it is shared with the host and the driver does not count it. CUDA does not
    use a GPU with MIG instances as a whole.
    """

    index: int
    uuid: str
    name: str
    total_gib: float | None
    free_gib: float | None
    mig: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """The memory usage of GPUs at one moment, by index: GiB in use, and GiB of each process.

    The PIDs are the driver's, that is the host's. A GPU that does not count is left out.
    """

    used_gib: Mapping[int, float]
    processes: Mapping[int, Mapping[int, float]]


NO_USAGE = Usage({}, {})


class Accelerator(Protocol):
    """The memory that engines use. Every method blocks and may raise AcceleratorError."""

    def devices(self) -> tuple[Device, ...]:
        """Return the GPUs of this machine, () where there is none."""

    def usage(self, gpus: Collection[int] | None = None) -> Usage:
        """Return the usage of these GPUs now (None: all), the baseline of `unreleased_gib`."""

    def used_gib(self, pids: Collection[int]) -> float | None:
        """Return the GiB that these processes use together; None where that is unknown.

        GPU memory where there is a GPU, else resident memory.
        """

    def unreleased_gib(
        self, pids: Collection[int], before: Usage, gpus: Collection[int] | None = None
    ) -> float:
        """Return the GiB that ended processes have not released, 0.0 when all is free.

        `before` is the usage before their start, `gpus` the GPUs that they could use (None: all).
        What other processes have taken since is subtracted where the driver's PIDs are known. In a
        container they are not: it is included there, and without `before` the result is unknown and
        AcceleratorError is raised.
        """


class HostMemory:
    """Resident memory of processes, from /proc; see Accelerator."""

    def __init__(self, *, driver_failed: bool = False) -> None:
        """`driver_failed`: there is an NVIDIA driver, which does not work."""
        self.driver_failed = driver_failed

    def devices(self) -> tuple[Device, ...]:
        return ()

    def usage(self, gpus: Collection[int] | None = None) -> Usage:
        return NO_USAGE

    def used_gib(self, pids: Collection[int]) -> float:
        return sum(map(_resident_bytes, pids)) / GIB

    def unreleased_gib(
        self, pids: Collection[int], before: Usage, gpus: Collection[int] | None = None
    ) -> float:
        return self.used_gib(pids)


class GpuMemory:
    """Memory of NVIDIA GPUs; see Accelerator. `nvml` is nvidia-ml-py, initialized."""

    def __init__(self, nvml: ModuleType, *, host_pids: bool) -> None:
        self._nvml = nvml
        # Whether the driver's PIDs are ours: in a container the same PID is another process.
        self._host_pids = host_pids

    def devices(self) -> tuple[Device, ...]:
        with self._translate_errors():
            count = self._nvml.nvmlDeviceGetCount()
        return tuple(d for d in map(self._device, range(count)) if d is not None)

    def usage(self, gpus: Collection[int] | None = None) -> Usage:
        used: dict[int, float] = {}
        processes: dict[int, Mapping[int, float]] = {}
        with self._translate_errors():
            if gpus is None:
                gpus = range(self._nvml.nvmlDeviceGetCount())
            for index in gpus:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                processes[index] = self._processes(handle)
                if (memory := self._memory(handle)) is not None:
                    total, free = memory
                    used[index] = total - free
        return Usage(used, processes)

    def used_gib(self, pids: Collection[int]) -> float | None:
        if not self._host_pids:
            return None
        return sum(_sum_of(pids, listed) for listed in self.usage().processes.values())

    def unreleased_gib(
        self, pids: Collection[int], before: Usage, gpus: Collection[int] | None = None
    ) -> float:
        now = self.usage(gpus)
        if not self._host_pids and not now.processes.keys() <= before.used_gib.keys():
            raise AcceleratorError("the driver's PIDs are not ours, and there is no baseline")
        return unreleased_gib(pids if self._host_pids else None, before, now)

    def _device(self, index: int) -> Device | None:
        try:
            with self._translate_errors():
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = self._nvml.nvmlDeviceGetUUID(handle)
                name = self._nvml.nvmlDeviceGetName(handle)
                total, free = self._memory(handle) or (None, None)
                return Device(index, uuid, name, total, free, self._mig(handle))
        except AcceleratorError as error:
            log.warning("GPU %d ignored: %s", index, error)
            return None

    def _memory(self, handle: object) -> tuple[float, float] | None:
        """Return total and free GiB, None where the GPU does not count its memory."""
        with self._ignore_unsupported():
            info = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            return info.total / GIB, info.free / GIB
        return None

    def _mig(self, handle: object) -> bool:
        with self._ignore_unsupported():
            current, _ = self._nvml.nvmlDeviceGetMigMode(handle)
            return bool(current)
        return False

    def _processes(self, handle: object) -> Mapping[int, float]:
        """Return the GiB of each process; unknown ones are left out."""
        for version in ("v3", "v2"):  # drivers before 510 have only v2
            list_processes = getattr(self._nvml, f"nvmlDeviceGetComputeRunningProcesses_{version}")
            with self._ignore_unsupported():
                return {
                    p.pid: p.usedGpuMemory / GIB for p in list_processes(handle) if p.usedGpuMemory
                }
        return {}

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise AcceleratorError(f"NVML: {error}") from None

    @contextmanager
    def _ignore_unsupported(self) -> Iterator[None]:
        """Ignore what this driver or GPU does not support or does not permit."""
        nvml = self._nvml
        with contextlib.suppress(
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_NoPermission,
        ):
            yield


def find_accelerator() -> Accelerator:
    """Return the accelerator of this machine. Never raises.

    If the driver does not work, that is logged, and the result is host memory without GPUs.
    """
    import pynvml  # 7,000 lines that only this function needs

    try:
        pynvml.nvmlInit()
        if pynvml.nvmlDeviceGetCount():
            return GpuMemory(pynvml, host_pids=_in_host_namespace())
    except pynvml.NVMLError_LibraryNotFound:
        log.debug("no NVIDIA driver found")
    except pynvml.NVMLError as error:
        log.warning("no GPU can be used: NVML: %s", error)
        return HostMemory(driver_failed=True)
    return HostMemory()


def unreleased_gib(pids: Collection[int] | None, before: Usage, now: Usage) -> float:
    """Return the GiB of `now` that the ended processes `pids` may not have released.

    The larger of two measures: the memory of these processes as the driver lists it, and the growth
    since `before` without that of other processes. `pids` is None where the driver's PIDs are not
    ours; there, the other processes are those that `before` lists.
    """
    left = 0.0
    for gpu, listed in now.processes.items():
        listed_before = before.processes.get(gpu, {})
        ours: Collection[int] = listed.keys() - listed_before.keys() if pids is None else pids

        def without_others(usage: Usage, ours: Collection[int] = ours, gpu: int = gpu) -> float:
            others = usage.processes.get(gpu, {})
            return usage.used_gib[gpu] - sum(n for pid, n in others.items() if pid not in ours)

        grown = 0.0
        if gpu in now.used_gib and gpu in before.used_gib:
            grown = without_others(now) - without_others(before)
        listed_gib = 0.0 if pids is None else _sum_of(pids, listed)
        left += max(listed_gib, grown if grown > TOLERANCE_GIB else 0.0)
    return left


async def wait_until_released(
    accelerator: Accelerator,
    pids: Collection[int],
    before: Usage,
    *,
    gpus: Collection[int] | None = None,
    timeout_s: float,
) -> float | None:
    """Wait until ended processes have released their memory, for at most `timeout_s`.

    Returns the GiB that are not released by then, 0.0 when all is free, None if that is unknown:
    the driver failed, which is logged, or hangs. For the rest see Accelerator.unreleased_gib.
    """
    left: float | None = None
    pause = FIRST_POLL_S
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                left = await _measure(accelerator, pids, before, gpus)
                if left is None or left == 0.0:
                    break
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_POLL_S)
    return left


async def _measure(
    accelerator: Accelerator,
    pids: Collection[int],
    before: Usage,
    gpus: Collection[int] | None,
) -> float | None:
    """Measure in a thread that is never joined: NVML may hang for ever with its GPU."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[float | None] = loop.create_future()

    def set_result(left: float | None) -> None:
        if not result.done():
            result.set_result(left)

    def measure() -> None:
        left = None
        try:
            left = accelerator.unreleased_gib(pids, before, gpus)
        except AcceleratorError as error:
            log.warning("cannot measure GPU memory: %s", error)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(set_result, left)

    threading.Thread(target=measure, name="measure memory", daemon=True).start()
    return await result


def _sum_of(pids: Collection[int], listed: Mapping[int, float]) -> float:
    return sum(listed.get(pid, 0.0) for pid in pids)


def _in_host_namespace() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == HOST_PID_NAMESPACE
    except OSError:
        return False


def _resident_bytes(pid: int) -> int:
    """Return the bytes of a process with its part of shared memory; 0 when it has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except PermissionError:
        with contextlib.suppress(OSError):
            pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass  # it ended meanwhile
    return 0
