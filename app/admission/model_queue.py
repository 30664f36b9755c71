"""The requests of one model: those under way, and those that wait until an engine has room."""

import asyncio
from collections.abc import Callable
from math import inf
from time import perf_counter

from app.admission.fair_queue import FairQueue
from app.admission.service_rate import ServiceRate
from app.errors import EngineOverloaded
from app.settings import QueueSettings
from app.telemetry.metrics import Metrics
from engines.base import ChangeNotifier


class ModelQueue:
    """Admits the requests of one model, as many at once as its engines take.

    A slot is held from `enter` or `wait` until `leave`. Who leaves hands the slot to the next in
    the queue at once, not to whoever comes first: nobody overtakes those who wait.
    """

    def __init__(
        self,
        model: str,
        settings: QueueSettings,
        ready: Callable[[], int],
        engine_changes: ChangeNotifier,
        metrics: Metrics,
    ) -> None:
        """`ready` returns how many engines are READY; `engine_changes` is the event of changes."""
        self.model = model
        self._ready = ready
        self._engine_changes = engine_changes
        self._metrics = metrics
        self.in_flight = 0  # slots that are held
        # Each item is what its request awaits: True, it has a slot; False, it has waited too long.
        self._queue: FairQueue[asyncio.Future[bool]] = FairQueue()
        self._pace = ServiceRate()
        # Done at the next change of an engine; None: no request waits for that.
        self._engine_change: asyncio.Future[None] | None = None
        # Set when no slot is held; None: nothing waits for that.
        self._quiet: asyncio.Event | None = None
        metrics.add_model(model)
        self.rebound(settings)

    def rebound(self, settings: QueueSettings) -> None:
        """Go by other bounds. Who waits already stays, as long as he was told he may."""
        self._bound = inf if settings.max_in_flight is None else settings.max_in_flight
        self.max_waiting = settings.max_waiting
        self._timeout_s = settings.timeout_s
        self._hand_out()

    async def quiet(self) -> None:
        """Return when no slot is held; then nobody waits either."""
        if self.in_flight:
            if self._quiet is None:
                self._quiet = asyncio.Event()
            await self._quiet.wait()

    @property
    def waiting(self) -> int:
        return self._queue.size

    def enter(self) -> bool:
        """Take a slot if there is one that nobody waits for; return whether."""
        if self._queue.size:
            self._hand_out()  # so that there is no room left if somebody still waits
        # The first condition is that of `_has_room`, without a call where there is no bound.
        if self.in_flight < self._bound or self._has_room():
            self.in_flight += 1
            return True
        return False

    async def wait(self, key_id: str, priority: int, weight: float, tokens: int) -> float:
        """Return with a slot, and how many seconds that took. Raises EngineOverloaded.

        Cancelled, it leaves without one: a slot that was handed to it meanwhile goes to the next.
        """
        began = perf_counter()
        if self._queue.size >= self.max_waiting:
            raise self._overloaded("has as many requests under way and waiting as it may", began)
        if not self._queue.size:
            self._pace.begin(began)
        loop = asyncio.get_running_loop()
        given: asyncio.Future[bool] = loop.create_future()
        place = self._queue.push(given, key_id, priority, weight, tokens)
        timeout = loop.call_later(self._timeout_s, _give_up, given)
        self._watch_engines()
        self._metrics.queue_depth.add((self.model,), 1)
        try:
            has_slot = await given
        except BaseException:
            if given.done() and not given.cancelled() and given.result():
                self.leave()
            raise
        finally:
            timeout.cancel()
            self._queue.remove(place)
            if not self._queue.size and self._engine_change is not None:
                self._engine_change.cancel()
                self._engine_change = None
            waited_s = perf_counter() - began
            self._metrics.queue_depth.add((self.model,), -1)
            self._metrics.queue_wait.observe((self.model,), waited_s)
        if not has_slot:
            told = f"had no room for this request within {self._timeout_s:g} s"
            raise self._overloaded(told, perf_counter())
        return waited_s

    def leave(self) -> None:
        """Give a slot back, once; whoever is next has it when this returns."""
        self.in_flight -= 1
        if self._queue.size:
            self._hand_out()
        # Only now: a lane in which a request waits is never quiet.
        if self._quiet is not None and not self.in_flight:
            self._quiet.set()
            self._quiet = None

    def _has_room(self) -> bool:
        # With no engine up there is still one's room, for requests that find out why.
        return self.in_flight < self._bound or self.in_flight < self._bound * self._ready()

    def _hand_out(self) -> None:
        """Give each slot that is free to the next who waits."""
        while (place := self._queue.head()) is not None:
            if place.item.done():  # cancelled or too late, and its task has not run yet
                self._queue.remove(place)
            elif self._has_room():
                self._queue.pop()
                self._pace.served(perf_counter())
                self.in_flight += 1
                place.item.set_result(True)
            else:
                return

    def _watch_engines(self) -> None:
        if self._engine_change is None:
            self._engine_change = self._engine_changes.next()
            self._engine_change.add_done_callback(self._on_engine_change)

    def _on_engine_change(self, change: asyncio.Future[None]) -> None:
        """Hand out the slots of an engine that became READY; keep watching while requests wait."""
        if change.cancelled():
            return
        self._engine_change = None
        self._hand_out()
        if self._queue.size:
            self._watch_engines()

    def _overloaded(self, what: str, now: float) -> EngineOverloaded:
        retry_after_s = self._pace.retry_after_s(self._queue.size, now)
        error = EngineOverloaded(f"the model {self.model!r} {what}; try again in {retry_after_s} s")
        error.retry_after_s = retry_after_s
        return error


def _give_up(given: asyncio.Future[bool]) -> None:
    if not given.done():
        given.set_result(False)
