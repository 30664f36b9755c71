"""The plans of memory of the models that run here, read from their files when a page shows them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.settings import ModelSettings
from engines.gpu import AcceleratorError, Device
from engines.plan import engine_memory
from engines.process import vllm_runs_on_cpu
from engines.spec import LocalSpec

# Files may be on a disk that hangs: a page does not wait for it.
PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The lines of a plan, and the engines of the model that it is for, by their numbers."""

    engines: Sequence[int]
    lines: Sequence[str]


class MemoryPlans:
    """Reads the plan of each model once for its settings, in a thread, one at a time."""

    def __init__(self, devices: Callable[[], Sequence[Device]]) -> None:
        """`devices` blocks, and raises AcceleratorError."""
        self._devices = devices
        self._turn = asyncio.Lock()
        self._read: dict[str, tuple[ModelSettings, asyncio.Task[list[EnginePlan]]]] = {}

    async def of(self, settings: ModelSettings) -> Sequence[EnginePlan] | None:
        """Return the plans of a model; None: they are still being read."""
        known, task = self._read.get(settings.name, (None, None))
        if task is None or known is not settings:
            task = asyncio.create_task(self._plan(settings), name="plan memory")
            self._read[settings.name] = settings, task
        await asyncio.wait({task}, timeout=PATIENCE_S)
        return task.result() if task.done() else None

    async def aclose(self) -> None:
        """End the reads that are under way."""
        tasks = [task for _, task in self._read.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _plan(self, settings: ModelSettings) -> list[EnginePlan]:
        async with self._turn:
            return await asyncio.to_thread(self._look, settings)

    def _look(self, settings: ModelSettings) -> list[EnginePlan]:
        by_spec: list[tuple[LocalSpec, list[int]]] = []
        for number, spec in enumerate(settings.engines):
            if not isinstance(spec, LocalSpec):
                continue
            same = next((numbers for other, numbers in by_spec if other == spec), None)
            if same is None:
                by_spec.append((spec, [number]))
            else:
                same.append(number)
        plans = [
            EnginePlan(one, [*engine_memory(spec, self._gpu_gib, vllm_runs_on_cpu)])
            for spec, one in by_spec
        ]
        return [plan for plan in plans if plan.lines]

    def _gpu_gib(self) -> float | None:
        try:
            return next((device.total_gib for device in self._devices()), None)
        except AcceleratorError:
            return None
