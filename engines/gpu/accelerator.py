"""Where memory is asked for: GPU memory through NVML where there is a GPU, the host's elsewhere.

Every question blocks, and NVML's for as long as the driver pleases: off the event loop with them.
`until_released` sees to that itself.
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
# Other users of a GPU, the driver among them, move by this much without anybody having started.
TOLERANCE_GIB = 0.25
FIRST_LOOK_S = 0.05
LONGEST_LOOK_S = 0.5
# The first pid namespace of a machine has this number: PROC_PID_INIT_INO of Linux's proc_ns.h.
HOST_PID_NAMESPACE = f"pid:[{0xEFFFFFFC}]"


class AcceleratorError(Exception):
    """The driver did not answer; the text is one line in its own words."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; `index` is NVML's, which is CUDA's under CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Memory is None where it is one with the host's and the driver does not count it. A GPU that is
    split into MIG instances is no device that CUDA would use as a whole.
    """

    index: int
    uuid: str
    name: str
    total_gib: float | None
    free_gib: float | None
    mig: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """What GPUs held at one moment, by index: GiB in use, and what each process had of them.

    The pids are the driver's, that is the host's. A GPU that does not count is left out.
    """

    used_gib: Mapping[int, float]
    processes: Mapping[int, Mapping[int, float]]


NO_USAGE = Usage({}, {})


class Accelerator(Protocol):
    """The memory that engines use. Every method blocks and may raise AcceleratorError."""

    def devices(self) -> tuple[Device, ...]:
        """Return the GPUs of this machine, () where there is none."""
        ...

    def usage(self, gpus: Collection[int] | None = None) -> Usage:
        """Return what these GPUs hold now (None: all), the baseline of `unreleased_gib`."""
        ...

    def held_gib(self, pids: Collection[int]) -> float | None:
        """Return the GiB that these processes hold together; None where that cannot be known.

        GPU memory where there is a GPU, resident memory elsewhere.
        """
        ...

    def unreleased_gib(
        self, pids: Collection[int], before: Usage, gpus: Collection[int] | None = None
    ) -> float:
        """Return the GiB that processes which were ended still hold, 0.0 when all is free.

        `before` is the usage from before they were started, `gpus` what they could use (None:
        all). What others have taken meanwhile is told apart as far as the driver does: in a
        container, where it numbers processes in a way nobody here knows, it is counted in, and
        without `before` nothing is known: AcceleratorError.
        """
        ...


class HostMemory:
    """Resident memory of processes, from /proc; see Accelerator."""

    def devices(self) -> tuple[Device, ...]:
        return ()

    def usage(self, gpus: Collection[int] | None = None) -> Usage:
        return NO_USAGE

    def held_gib(self, pids: Collection[int]) -> float:
        return sum(map(_resident, pids)) / GIB

    def unreleased_gib(
        self, pids: Collection[int], before: Usage, gpus: Collection[int] | None = None
    ) -> float:
        return self.held_gib(pids)


class GpuMemory:
    """Memory of NVIDIA's GPUs; see Accelerator. `nvml` is nvidia-ml-py, initialised."""

    def __init__(self, nvml: ModuleType, *, host_pids: bool) -> None:
        self._nvml = nvml
        # Whether the driver's pids are ours: in a container the same number is somebody else.
        self._host_pids = host_pids

    def devices(self) -> tuple[Device, ...]:
        with self._told():
            count = self._nvml.nvmlDeviceGetCount()
        return tuple(d for d in map(self._device, range(count)) if d is not None)

    def usage(self, gpus: Collection[int] | None = None) -> Usage:
        used: dict[int, float] = {}
        processes: dict[int, Mapping[int, float]] = {}
        with self._told():
            if gpus is None:
                gpus = range(self._nvml.nvmlDeviceGetCount())
            for index in gpus:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                processes[index] = self._processes(handle)
                if (memory := self._memory(handle)) is not None:
                    total, free = memory
                    used[index] = total - free
        return Usage(used, processes)

    def held_gib(self, pids: Collection[int]) -> float | None:
        if not self._host_pids:
            return None
        return sum(_of(pids, listed) for listed in self.usage().processes.values())

    def unreleased_gib(
        self, pids: Collection[int], before: Usage, gpus: Collection[int] | None = None
    ) -> float:
        now = self.usage(gpus)
        if not self._host_pids and not now.processes.keys() <= before.used_gib.keys():
            raise AcceleratorError("the driver's pids are not ours, and memory was not counted")
        return unreleased_gib(pids if self._host_pids else None, before, now)

    def _device(self, index: int) -> Device | None:
        try:
            with self._told():
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = self._nvml.nvmlDeviceGetUUID(handle)
                name = self._nvml.nvmlDeviceGetName(handle)
                total, free = self._memory(handle) or (None, None)
                return Device(index, uuid, name, total, free, self._mig(handle))
        except AcceleratorError as error:
            log.warning("GPU %d is left out: %s", index, error)
            return None

    def _memory(self, handle: object) -> tuple[float, float] | None:
        """Return total and free GiB, None where the GPU has no memory of its own to count."""
        with self._unless_unsupported():
            info = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            return info.total / GIB, info.free / GIB
        return None

    def _mig(self, handle: object) -> bool:
        with self._unless_unsupported():
            current, _ = self._nvml.nvmlDeviceGetMigMode(handle)
            return bool(current)
        return False

    def _processes(self, handle: object) -> Mapping[int, float]:
        """Return the GiB of each process; what the driver may not or cannot tell is left out."""
        for version in ("v3", "v2"):  # drivers before 510 know the second only
            ask = getattr(self._nvml, f"nvmlDeviceGetComputeRunningProcesses_{version}")
            with self._unless_unsupported():
                return {p.pid: p.usedGpuMemory / GIB for p in ask(handle) if p.usedGpuMemory}
        return {}

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise AcceleratorError(f"NVML: {error}") from None

    @contextmanager
    def _unless_unsupported(self) -> Iterator[None]:
        """Pass over what this driver or GPU does not have, or does not tell us."""
        nvml = self._nvml
        with contextlib.suppress(
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_NoPermission,
        ):
            yield


def find_accelerator() -> Accelerator:
    """Return where memory is to be asked for on this machine. Never raises.

    A driver that is there and does not work is told in one line of the log; then the host's
    memory stands in, and there are no GPUs.
    """
    import pynvml  # 7,000 lines that only machines with GPUs need

    try:
        pynvml.nvmlInit()
        if pynvml.nvmlDeviceGetCount():
            return GpuMemory(pynvml, host_pids=_in_host_namespace())
    except pynvml.NVMLError_LibraryNotFound:
        log.debug("no NVIDIA driver here")
    except pynvml.NVMLError as error:
        log.warning("no GPU can be used, NVML says: %s", error)
    return HostMemory()


def unreleased_gib(pids: Collection[int] | None, before: Usage, now: Usage) -> float:
    """Return the GiB of `now` that the processes `pids`, ended by now, may still hold.

    Two witnesses, and the one that says more is believed: the processes that the driver lists,
    and what is in use beyond `before` once that of other processes is taken out. `pids` is None
    where the driver's pids are not ours; there, others are those that `before` has already.
    """
    left = 0.0
    for gpu, listed in now.processes.items():
        listed_before = before.processes.get(gpu, {})
        mine: Collection[int] = listed.keys() - listed_before.keys() if pids is None else pids

        def unclaimed(usage: Usage, mine: Collection[int] = mine, gpu: int = gpu) -> float:
            others = usage.processes.get(gpu, {})
            return usage.used_gib[gpu] - sum(n for pid, n in others.items() if pid not in mine)

        grown = 0.0
        if gpu in now.used_gib and gpu in before.used_gib:
            grown = unclaimed(now) - unclaimed(before)
        named = 0.0 if pids is None else _of(pids, listed)
        left += max(named, grown if grown > TOLERANCE_GIB else 0.0)
    return left


async def until_released(
    accelerator: Accelerator,
    pids: Collection[int],
    before: Usage,
    *,
    gpus: Collection[int] | None = None,
    timeout_s: float,
) -> float | None:
    """Wait until the memory of processes that were ended is free, at most `timeout_s` seconds.

    Returns the GiB that are still held then, 0.0 when all is free, None when the driver does not
    say: it failed (one line in the log) or hangs. The rest as in Accelerator.unreleased_gib.
    """
    left: float | None = None
    pause = FIRST_LOOK_S
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                left = await _look(accelerator, pids, before, gpus)
                if left is None or left == 0.0:
                    break
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_LOOK_S)
    return left


async def _look(
    accelerator: Accelerator,
    pids: Collection[int],
    before: Usage,
    gpus: Collection[int] | None,
) -> float | None:
    """Ask in a thread that nobody joins: a GPU that hangs takes NVML along, for good."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[float | None] = loop.create_future()

    def settle(left: float | None) -> None:
        if not answer.done():
            answer.set_result(left)

    def ask() -> None:
        left = None
        try:
            left = accelerator.unreleased_gib(pids, before, gpus)
        except AcceleratorError as error:
            log.warning("whether GPU memory is free is not known: %s", error)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, left)

    threading.Thread(target=ask, name="ask for memory", daemon=True).start()
    return await answer


def _of(pids: Collection[int], listed: Mapping[int, float]) -> float:
    return sum(listed.get(pid, 0.0) for pid in pids)


def _in_host_namespace() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == HOST_PID_NAMESPACE
    except OSError:
        return False


def _resident(pid: int) -> int:
    """Return the bytes that a process holds, its part of what is shared; 0 when it has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except PermissionError:
        with contextlib.suppress(OSError):
            pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass  # it ended before or while it was read
    return 0
