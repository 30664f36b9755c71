"""Whether a request may begin, and how many are under way.

A `Permit` is held from before an engine is chosen until the last byte has left, so "none in flight"
means that the gateway may end.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from app.admission.model_queue import ModelQueue
from app.errors import EngineUnavailable, ModelNotFound
from app.settings import QueueSettings
from app.telemetry.logs.access import UNKNOWN_MODEL
from app.telemetry.metrics import Metrics
from engines.base import ChangeNotifier


class Permit(msgspec.Struct, gc=False, eq=False):
    """The right of one request to be under way, held until its context is left."""

    lane: ModelQueue
    waited_s: float | None  # None: it did not have to wait

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lane.leave()


class Admission:
    """Gives permits, until the gateway drains."""

    def __init__(
        self,
        metrics: Metrics,
        queues: Mapping[str, QueueSettings],
        ready: Callable[[str], int],
        engine_changes: ChangeNotifier,
    ) -> None:
        """`queues` has the settings of every model.

        `ready` returns how many engines of a model are READY; `engine_changes` is the event of its
        changes.
        """
        self._ready = ready
        self._engine_changes = engine_changes
        self._metrics = metrics
        self._draining = False
        self._lanes: dict[str | None, ModelQueue] = {}
        # Those of models that are gone, in which requests are under way.
        self._leaving: list[ModelQueue] = []
        for model, settings in queues.items():
            self.open(model, settings)
        no_queue = QueueSettings()
        self._lanes[None] = self._queue(UNKNOWN_MODEL, no_queue, lambda: 1)

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def in_flight(self) -> int:
        """How many requests hold a permit."""
        return sum(lane.in_flight for lane in self._all())

    @property
    def waiting(self) -> int:
        """How many requests wait for one."""
        return sum(lane.waiting for lane in self._all())

    def open(self, model: str, settings: QueueSettings) -> None:
        """Take requests for a model, by these settings from now on; who waits keeps his place."""
        lane = self._lanes.get(model)
        if lane is None:
            ready = partial(self._ready, model)
            self._lanes[model] = self._queue(model, settings, ready)
        else:
            lane.rebound(settings)

    def close(self, model: str) -> None:
        """Take no more requests for a model that is gone; those that were accepted go on."""
        lane = self._lanes.pop(model)
        self._leaving = [one for one in (*self._leaving, lane) if one.in_flight]

    async def quiet(self, model: str) -> None:
        """Return when no request for a model is under way; then none waits either."""
        await self._lanes[model].quiet()

    def standing(self, model: str) -> tuple[int, int]:
        """Return how many requests for a model are under way, and how many wait."""
        lane = self._lanes[model]
        return lane.in_flight, lane.waiting

    def in_flight_by_model(self) -> Iterator[tuple[str, int]]:
        """Return every model with how many of its requests are under way."""
        for model, lane in self._lanes.items():
            yield model or UNKNOWN_MODEL, lane.in_flight
        for lane in self._leaving:
            yield lane.model, lane.in_flight

    def queue_limits(self) -> Iterator[tuple[str, int]]:
        """Return every model with how many of its requests may wait."""
        for model, lane in self._lanes.items():
            if model is not None:
                yield model, lane.max_waiting

    async def permit(
        self,
        model: str | None,
        key_id: str,
        priority: int = 0,
        weight: float = 1.0,
        tokens: int = 0,
    ) -> Permit:
        """Return a permit, counted from now; await it in the `with` statement that ends it.

        `model` is one that there is, or None for a request that names none and never waits. The
        rest says when its turn is (`fair.py`): `tokens` is what it may take, prompt and answer.
        Raises EngineUnavailable while draining, EngineOverloaded where too many wait or the wait
        is too long, and ModelNotFound for a model that has gone since it was found. Who waits
        already when the gateway begins to drain was accepted, and goes on in turn as long as the
        drain may take.
        """
        lane = self._lane(model)
        if lane.enter():
            return Permit(lane, None)
        return Permit(lane, await lane.wait(key_id, priority, weight, tokens))

    def permit_at_once(self, model: str | None) -> Permit | None:
        """Return what `permit` returns where a request need not wait; None: it must.

        Raises EngineUnavailable and ModelNotFound as `permit` does.
        """
        lane = self._lane(model)
        return Permit(lane, None) if lane.enter() else None

    def _lane(self, model: str | None) -> ModelQueue:
        if self._draining:
            raise EngineUnavailable("the gateway is shutting down; try again")
        try:
            return self._lanes[model]
        except KeyError:
            raise ModelNotFound(f"the model {model!r} is no longer here; see /v1/models") from None

    def drain(self) -> None:
        """Give no more permits but to those who wait for one."""
        self._draining = True
        self._engine_changes.notify()  # requests that wait for an engine's start wait no longer

    async def idle(self) -> None:
        """Return when no request is under way; then none waits either."""
        while (lane := next((lane for lane in self._all() if lane.in_flight), None)) is not None:
            await lane.quiet()

    def _queue(self, model: str, settings: QueueSettings, ready: Callable[[], int]) -> ModelQueue:
        return ModelQueue(model, settings, ready, self._engine_changes, self._metrics)

    def _all(self) -> tuple[ModelQueue, ...]:
        return *self._lanes.values(), *self._leaving
