"""Admits requests: one queue per model, and the count of requests in flight.

A `Permit` is held from before an engine is chosen until the last byte is sent, so with none in
flight the gateway may exit.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from app.admission.fair_queue import QueueEntry
from app.admission.model_queue import ModelQueue
from app.errors import ModelNotFound, shutting_down
from app.settings import QueueSettings, SlotsPerEngine
from app.telemetry import UNKNOWN_MODEL
from app.telemetry.metrics import Metrics
from engines.base import ChangeNotifier


class Permit(msgspec.Struct, gc=False, eq=False):
    """One request's slot in its model's queue, held until the context is left."""

    queue: ModelQueue
    waited_s: float | None  # None: it did not have to wait
    suspended: bool = False  # held, while its request is at no engine
    entry: QueueEntry[asyncio.Future[bool]] | None = None  # where it waited; None: nowhere

    def correct(self, tokens: float) -> None:
        """Note what the request took, in place of its estimate: its key's next turn goes by it."""
        if self.entry is not None:
            self.queue.correct(self.entry, tokens)

    def suspend(self) -> None:
        """Keep the slot, but not the engine's part of it: the request is at no engine."""
        if not self.suspended:
            self.suspended = True
            self.queue.suspend()

    async def resume(self) -> None:
        """Return when an engine has room for the suspended request, before all that wait."""
        if self.suspended:
            await self.queue.wait_for_room()
            if self.suspended:
                self._end_suspension()

    def _end_suspension(self) -> None:
        self.suspended = False
        self.queue.suspended -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.suspended:
            self._end_suspension()
        self.queue.release()


class Admission:
    """Issues permits until the gateway drains."""

    def __init__(
        self,
        metrics: Metrics,
        settings: Mapping[str, QueueSettings],
        count_slots: Callable[[str, SlotsPerEngine], int],
        engine_changes: ChangeNotifier,
    ) -> None:
        """`settings` has those of every model.

        `count_slots` returns a model's capacity for so many slots per engine, of whose changes
        `engine_changes` notifies.
        """
        self._count_slots = count_slots
        self._engine_changes = engine_changes
        self._metrics = metrics
        self._draining = False
        self._refusing = False
        self._queues: dict[str | None, ModelQueue] = {}
        # Queues of removed models that still have requests in flight.
        self._closing: list[ModelQueue] = []
        for model, of_model in settings.items():
            self.open(model, of_model)
        self._queues[None] = self._create_queue(UNKNOWN_MODEL, QueueSettings(), lambda slots: 1)

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def in_flight(self) -> int:
        """Number of requests that hold a permit."""
        return sum(queue.in_flight for queue in self._all())

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a permit."""
        return sum(queue.waiting for queue in self._all())

    def open(self, model: str, settings: QueueSettings) -> None:
        """Create the queue of a model, or apply new settings to it (`ModelQueue.update`)."""
        queue = self._queues.get(model)
        if queue is None:
            count_slots = partial(self._count_slots, model)
            self._queues[model] = self._create_queue(model, settings, count_slots)
        else:
            queue.update(settings)

    def close(self, model: str) -> None:
        """Admit no more requests for a removed model; those that were admitted go on."""
        queue = self._queues.pop(model)
        self._closing = [one for one in (*self._closing, queue) if one.in_flight]

    def automatic(self) -> list[str]:
        """Return the models whose slots per engine are found by itself."""
        return [name for name, queue in self._queues.items() if name and queue.automatic]

    def fill(self, model: str) -> None:
        """Grant the slots that a model has more than before; it must exist."""
        self._queues[model].fill()

    def counts(self, model: str) -> tuple[int, int]:
        """Return the number of a model's requests in flight, and of those waiting."""
        queue = self._queues[model]
        return queue.in_flight, queue.waiting

    def ended(self, model: str) -> int:
        """Return the number of a model's requests that were in flight and have ended."""
        return self._queues[model].ended

    def in_flight_by_model(self) -> Iterator[tuple[str, int]]:
        """Yield every model with its number of requests in flight."""
        for model, queue in self._queues.items():
            yield model or UNKNOWN_MODEL, queue.in_flight
        for queue in self._closing:
            yield queue.model, queue.in_flight

    def queue_limits(self) -> Iterator[tuple[str, int]]:
        """Yield every model with the capacity of its queue."""
        for model, queue in self._queues.items():
            if model is not None:
                yield model, queue.max_waiting

    def fairness(self) -> Iterator[tuple[str, float]]:
        """Yield each model for which several keys wait, with how evenly these are served."""
        for model, queue in self._queues.items():
            if model is not None and (index := queue.fairness) is not None:
                yield model, index

    async def acquire(
        self,
        model: str | None,
        key_id: str,
        priority: int = 0,
        weight: float = 1.0,
        tokens: int = 0,
        deadline: float | None = None,
    ) -> Permit:
        """Return a permit; enter it with no await in between.

        `model` must exist, or is None for a request without one, which never waits. The rest
        decides its turn (`fair_queue.py`); `tokens` estimates what it takes (`Permit.correct`).
        `deadline`, by perf_counter, is when the wait has to be over.

        Raises EngineUnavailable after `drain`, EngineOverloaded if the queue is full or the wait is
        or would be too long, and ModelNotFound for a model that was removed since it was found.
        Requests that wait already when the gateway begins to drain are served in turn until the
        drain times out.
        """
        queue = self._find_queue(model)
        if queue.try_acquire():
            return Permit(queue, None)
        waited_s, entry = await queue.acquire(key_id, priority, weight, tokens, deadline)
        return Permit(queue, waited_s, entry=entry)

    def try_acquire(self, model: str | None) -> Permit | None:
        """Return a permit if the request need not wait; None: it must.

        Raises EngineUnavailable and ModelNotFound as `acquire` does.
        """
        queue = None if self._refusing else self._queues.get(model)
        if queue is None:
            queue = self._find_queue(model)  # raises
        return Permit(queue, None) if queue.try_acquire() else None

    def _find_queue(self, model: str | None) -> ModelQueue:
        if self._refusing:
            raise shutting_down()
        try:
            return self._queues[model]
        except KeyError:
            raise ModelNotFound(f"the model {model!r} was removed; see /v1/models") from None

    def drain(self, *, refuse: bool = True) -> None:
        """Begin to drain, and issue no more permits except to requests that wait for one.

        Without `refuse`, requests get permits as before: no connection brings new ones for long.
        """
        self._draining = True
        self._refusing = refuse
        self._engine_changes.notify()  # ends waits for the start of an engine

    async def wait_until_idle(self, model: str | None = None) -> None:
        """Return when no request of a model, or of any, is in flight; then none waits either."""
        if model is not None:
            await self._queues[model].wait_until_idle()
            return
        while (busy := next((queue for queue in self._all() if queue.in_flight), None)) is not None:
            await busy.wait_until_idle()

    def _create_queue(
        self, model: str, settings: QueueSettings, count_slots: Callable[[SlotsPerEngine], int]
    ) -> ModelQueue:
        return ModelQueue(model, settings, count_slots, self._engine_changes, self._metrics)

    def _all(self) -> tuple[ModelQueue, ...]:
        return *self._queues.values(), *self._closing
