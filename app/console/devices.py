"""The memory of this machine's GPUs and of the host, read in a thread while a page shows it."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from app.console.fleet_view import EngineView
from app.console.language import gettext
from engines.base import EngineState
from engines.gpu import AcceleratorError, Device, available_host_gib

FRESH_S = 5.0
# Their memory is what they took when they ran.
_UNLOADED = (EngineState.STOPPED, EngineState.FAILED)


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What there is at one moment; None: unknown."""

    devices: Sequence[Device] | None = None
    host_free_gib: float | None = None


class MemoryReader:
    """Reads the memory at most once in FRESH_S. A driver may block for long: nobody waits."""

    def __init__(
        self,
        devices: Callable[[], Sequence[Device]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`devices` blocks, and raises AcceleratorError."""
        self._devices = devices
        self._clock = clock
        self._memory = MachineMemory()
        self._read_at: float | None = None
        self._reading: asyncio.Task[None] | None = None

    def newest(self) -> MachineMemory:
        """Return what was read last, and begin to read again when that is old."""
        stale = self._read_at is None or self._clock() - self._read_at >= FRESH_S
        if stale and self._reading is None:
            self._reading = asyncio.create_task(self._read(), name="read memory")
        return self._memory

    async def aclose(self) -> None:
        """End a read that is under way."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        try:
            self._memory = await asyncio.to_thread(self._look)
        finally:
            self._read_at = self._clock()
            self._reading = None

    def _look(self) -> MachineMemory:
        devices: Sequence[Device] | None = None
        with contextlib.suppress(AcceleratorError):
            devices = self._devices()
        return MachineMemory(devices, available_host_gib())


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The memory of an engine or a GPU, in GiB; None: unknown."""

    name: str
    where: str
    used_gib: float | None
    total_gib: float | None = None


def engine_memory(engines: Iterable[EngineView], machine: MachineMemory) -> list[MemoryRow]:
    """Return the memory of each engine that is loaded, and where it is. Pure."""
    rows: list[MemoryRow] = []
    for view in engines:
        row = view.row
        if row.memory_gib is None or row.state in _UNLOADED:
            continue
        if row.kind in ("ray", "remote"):
            where = gettext("another machine")
        elif view.gpus:
            where = f"GPU {view.gpus.replace(',', ', ')}"
        else:
            where = "GPU" if machine.devices else gettext("host")
        rows.append(MemoryRow(row.name, where, row.memory_gib))
    return rows


def device_memory(machine: MachineMemory) -> list[MemoryRow]:
    """Return the memory of each GPU. Pure."""
    return [
        MemoryRow(
            f"GPU {device.index}",
            device.name,
            None
            if device.total_gib is None or device.free_gib is None
            else device.total_gib - device.free_gib,
            device.total_gib,
        )
        for device in machine.devices or ()
    ]
