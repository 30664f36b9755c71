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
from engines.base import ChangeNotifier

# A forecast changes with time alone, too: a start that is late is expected to be later still.
FORECAST_S = 1.0


class ForecastNotifier(ChangeNotifier):
    """Wakes requests when a forecast may have changed: at every change, and every FORECAST_S."""

    __slots__ = ("_timer",)

    def __init__(self) -> None:
        super().__init__()
        self._timer: asyncio.TimerHandle | None = None

    def next(self) -> asyncio.Future[None]:
        """Return a future that is done at the next change, within FORECAST_S."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FORECAST_S, self._on_timer)
        return super().next()

    def _on_timer(self) -> None:
        self._timer = None
        self.notify()


class StartWait(msgspec.Struct, frozen=True):
    """A wait for a start that is over."""

    waited_s: float


class StartWaits:
    """The requests that wait for a start, by model. A model for which none does has no entry."""

    def __init__(self, metrics: Metrics, changes: ChangeNotifier) -> None:
        self._metrics = metrics
        self._changes = changes
        self._waiting: dict[str, int] = {}

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
            await self._changes.wait_for(over)
        finally:
            left = self._waiting.pop(model) - 1
            if left:
                self._waiting[model] = left
            waited_s = perf_counter() - began
            self._metrics.queue_depth.add((model,), -1)
            self._metrics.queue_wait.observe((model,), waited_s)
        return StartWait(waited_s)
