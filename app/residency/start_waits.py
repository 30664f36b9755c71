"""Requests that wait for engines which start without them, counted as those in a queue are.

They hold no engine's slot and no load: each looks whether its wait is over, all of one gateway in
the order in which they came.
"""

import asyncio
from collections.abc import Callable
from time import perf_counter

import msgspec

from app.errors import EngineOverloaded
from app.telemetry.metrics import Metrics

# No event tells that an engine became READY, so while somebody waits it is looked at this often.
LOOK_S = 0.25


class StartWait(msgspec.Struct, frozen=True):
    """A wait for a start that is over."""

    waited_s: float


class StartWaits:
    """The requests that wait for a start, by model. A model for which none does has no entry."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: dict[str, int] = {}
        # Set at the next look; None: nobody waits for one.
        self._look: asyncio.Event | None = None

    def waiting(self, model: str) -> int:
        """Return how many requests wait for a model."""
        return self._waiting.get(model, 0)

    async def wait(self, model: str, most: int, over: Callable[[], bool]) -> StartWait:
        """Return once `over` says so. Cancelled, it leaves nothing behind.

        Raises EngineOverloaded where `most` requests wait for the model already.
        """
        before = self._waiting.get(model, 0)
        if before >= most:
            raise EngineOverloaded(
                f"the model {model!r} is starting and has as many requests waiting as it may"
            )
        began = perf_counter()
        self._waiting[model] = before + 1
        self._metrics.queue_depth.add((model,), 1)
        try:
            while not over():
                await self._next_look()
        finally:
            left = self._waiting.pop(model) - 1
            if left:
                self._waiting[model] = left
            waited_s = perf_counter() - began
            self._metrics.queue_depth.add((model,), -1)
            self._metrics.queue_wait.observe((model,), waited_s)
        return StartWait(waited_s)

    async def _next_look(self) -> None:
        if self._look is None:
            self._look = asyncio.Event()
            asyncio.get_running_loop().call_later(LOOK_S, self._wake)
        await self._look.wait()

    def _wake(self) -> None:
        look, self._look = self._look, None
        if look is not None:
            look.set()
