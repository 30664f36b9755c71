"""The memory of GPUs and engines, read in a thread."""

from collections.abc import Sequence

from app.console.command_line import CommandLine
from app.console.devices import FRESH_S, MachineMemory, MemoryReader, device_memory, engine_memory
from app.console.fleet_view import EngineView
from app.fleet import EngineRow
from engines.base import EngineState
from engines.gpu import AcceleratorError, Device
from tests.app.console.test_actions import engine_row
from tests.waiting import wait_until

GPU = Device(0, "GPU-1", "NVIDIA L4", 24.0, 6.0)


def view(gpus: str = "", **fields: object) -> EngineView:
    row: EngineRow = engine_row(0).model_copy(update={"memory_gib": 4.0, **fields})
    return EngineView(row, CommandLine(), None, (), True, gpus)


async def test_it_is_read_in_the_background_and_kept_for_a_while() -> None:
    reads = 0
    now = 0.0

    def devices() -> Sequence[Device]:
        nonlocal reads
        reads += 1
        return (GPU,)

    reader = MemoryReader(devices, lambda: now)
    assert reader.newest() == MachineMemory()  # a driver may take long: the page does not wait
    await wait_until(lambda: reader.newest().devices == (GPU,))
    assert reads == 1
    now = FRESH_S
    reader.newest()
    await wait_until(lambda: reads == 2)
    await reader.aclose()


async def test_a_driver_that_fails_leaves_the_gpus_unknown() -> None:
    def devices() -> Sequence[Device]:
        raise AcceleratorError("NVML: lost")

    reader = MemoryReader(devices, lambda: 0.0)
    reader.newest()
    await wait_until(lambda: reader.newest().host_free_gib is not None)
    assert reader.newest().devices is None
    await reader.aclose()


def test_engines_have_their_memory_where_they_run() -> None:
    with_gpu, without = MachineMemory(devices=(GPU,)), MachineMemory(devices=())
    views = [view("0,1"), view(), view(kind="remote"), view(state=EngineState.STOPPED)]
    assert [row.where for row in engine_memory(views, with_gpu)] == [
        "GPU 0, 1",
        "GPU",
        "another machine",
    ]
    assert [row.where for row in engine_memory([view()], without)] == ["host"]


def test_devices_have_their_used_memory() -> None:
    shared = Device(1, "GPU-2", "GB10", None, None)
    first, second = device_memory(MachineMemory(devices=(GPU, shared)))
    assert (first.name, first.where, first.used_gib, first.total_gib) == (
        "GPU 0", "NVIDIA L4", 18.0, 24.0,
    )  # fmt: skip
    assert second.used_gib is None
