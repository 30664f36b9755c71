"""Requests that wait for an engine that is starting anyway; counted like those in a queue.

They hold no slot and cause no load. At every change each checks whether its wait is over, in order
of arrival.
"""

import asyncio
from collections.abc import Callable
from time import perf_counter

import msgspec

from app.errors import EngineOverloaded
from app.fair_places import find_displaced
from app.telemetry.metrics import Metrics
from engines.base import ChangeNotifier

# A forecast also changes as time passes: a late start is expected to be later still.
FORECAST_S = 1.0


class ForecastNotifier(ChangeNotifier):
    """Wakes requests when forecasts may have changed: at every change and every FORECAST_S."""

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
    """A finished wait for a start."""

    waited_s: float


class _Place:
    """The place of a waiting request."""

    __slots__ = ("displaced",)

    def __init__(self) -> None:
        self.displaced = False


class StartWaits:
    """The requests that wait for a start, by model; models without any are left out."""

    def __init__(self, metrics: Metrics, changes: ChangeNotifier) -> None:
        self._metrics = metrics
        self._changes = changes
        self._waiting: dict[str, dict[_Place, str | None]] = {}  # with their keys

    def waiting(self, model: str) -> int:
        """Return the number of requests that wait for a model."""
        return len(self._waiting.get(model, ()))

    async def wait(self, model: str, key: str, most: int, over: Callable[[], bool]) -> StartWait:
        """Return once `over` returns True.

        Raises EngineOverloaded if `most` requests wait for the model already, and none of another
        key gives up its place (`fair_places.py`), or if this one has to.
        """
        waiting = self._waiting.setdefault(model, {})
        if len(waiting) >= most:
            self._make_room(model, waiting, key)
        began = perf_counter()
        place = _Place()
        waiting[place] = key
        self._metrics.queue_depth.add((model,), 1)
        try:
            await self._changes.wait_for(lambda: place.displaced or over())
        finally:
            waiting.pop(place, None)
            if not waiting and self._waiting.get(model) is waiting:
                del self._waiting[model]
            waited_s = perf_counter() - began
            self._metrics.queue_depth.add((model,), -1)
            self._metrics.queue_wait.observe((model,), waited_s)
        if place.displaced:
            raise _overloaded(model)
        return StartWait(waited_s)

    def _make_room(self, model: str, waiting: dict[_Place, str | None], key: str) -> None:
        displaced = find_displaced(waiting, key)
        if displaced is None:
            raise _overloaded(model)
        del waiting[displaced]
        displaced.displaced = True  # it leaves at the next change: to wake it wakes all


def _overloaded(model: str) -> EngineOverloaded:
    return EngineOverloaded(
        f"the model {model!r} is starting and has as many requests waiting as it may"
    )
