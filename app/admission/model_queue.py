"""The queue of one model: requests in flight, and requests that wait for a slot."""

import asyncio
from collections.abc import Callable
from time import perf_counter

from app.admission.fair_queue import FairQueue, QueueEntry
from app.admission.fairness import FairnessIndex
from app.admission.service_rate import ServiceRate, bounded_retry_s
from app.errors import EngineOverloaded
from app.settings import QueueSettings, SlotsPerEngine
from app.telemetry.metrics import Metrics
from engines.base import ChangeNotifier


class ModelQueue:
    """Admits the requests of one model, as many at once as its engines take.

    Capacity is this gateway's part of `max_in_flight` slots per READY engine, which
    `app/routing/slots.py` has. A request holds a slot from `try_acquire` or `acquire` until
    `release`.

    No slot is lost, and no waiting request is overtaken. `release` grants the slot to the next
    waiting request in the same step: it counts as in flight before the task of that request runs,
    so a request that arrives in between finds no free slot. `try_acquire` serves the queue first,
    so it succeeds only if there are more free slots than waiting requests. A waiting request ends
    in exactly one way, by whatever settles its future first: a slot (True), its timeout (False) or
    cancellation. One that is canceled after it was granted a slot releases it.
    """

    def __init__(
        self,
        model: str,
        settings: QueueSettings,
        count_slots: Callable[[SlotsPerEngine], int],
        engine_changes: ChangeNotifier,
        metrics: Metrics,
    ) -> None:
        """`count_slots` returns the capacity for so many slots per engine, at least 1.

        `engine_changes` notifies of changes of that.
        """
        self.model = model
        self._count_slots = count_slots
        self._engine_changes = engine_changes
        self._metrics = metrics
        self.in_flight = 0  # slots that are held
        self.ended = 0  # slots that were given back, since the beginning
        self.suspended = 0  # of these, slots of requests that are at no engine for now
        # Notified of slots that become free while suspended requests wait for room.
        self._freed = ChangeNotifier()
        # What each waiting request awaits: True, it has a slot; False, its timeout is over; an
        # error, it was displaced.
        self._queue: FairQueue[asyncio.Future[bool]] = FairQueue()
        self._service_rate = ServiceRate()
        self._fairness = FairnessIndex()
        # Done at the next change of an engine; None: no request waits for that.
        self._engine_change: asyncio.Future[None] | None = None
        # Set when no slot is held; None: no one awaits that.
        self._idle: asyncio.Event | None = None
        metrics.add_model(model)
        self.update(settings)

    def update(self, settings: QueueSettings) -> None:
        """Apply new limits. Waiting requests keep their place and their original timeout."""
        self._max_in_flight = settings.max_in_flight
        self.max_waiting = settings.max_waiting
        self._timeout_s = settings.timeout_s
        self.fill()

    @property
    def automatic(self) -> bool:
        """True where the slots per engine are found by itself."""
        return self._max_in_flight == "auto"

    def fill(self) -> None:
        """Grant the slots that are free since the number of slots has changed."""
        self._freed.notify()
        self._grant_slots()

    async def wait_until_idle(self) -> None:
        """Return when no slot is held; then no request waits either."""
        if self.in_flight:
            if self._idle is None:
                self._idle = asyncio.Event()
            await self._idle.wait()

    @property
    def waiting(self) -> int:
        return self._queue.size

    def try_acquire(self) -> bool:
        """Take a slot if one is free and not due to a waiting request; return whether."""
        if self._queue.size:
            self._grant_slots()  # leaves no free slot unless the queue is empty
        # The first condition is that of `_has_capacity`, without a call where there is no limit.
        if self._max_in_flight is None or self._has_capacity():
            self.in_flight += 1
            return True
        return False

    async def acquire(
        self, key_id: str, priority: int, weight: float, tokens: int, deadline: float | None = None
    ) -> tuple[float, QueueEntry[asyncio.Future[bool]]]:
        """Wait for a slot; return the seconds that took, and the entry. Raises EngineOverloaded.

        `deadline` is by perf_counter. When canceled, it passes a slot that it was given meanwhile
        to the next request.
        """
        began = perf_counter()
        timeout_s, expected_s = self._timeout_s, None
        if deadline is not None:
            expected_s = self._expect_in_time(key_id, priority, deadline, began)
            timeout_s = min(timeout_s, deadline - began)
        if self._queue.size >= self.max_waiting:
            self._make_room(key_id, priority, began)
        if not self._queue.size:
            self._service_rate.restart(began)
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[bool] = loop.create_future()
        entry = self._queue.push(granted, key_id, priority, weight, tokens, deadline)
        timeout = loop.call_later(timeout_s, _time_out, granted)
        self._watch_engines()
        self._metrics.queue_depth.add((self.model,), 1)
        try:
            has_slot = await granted
        except BaseException:
            if _was_granted(granted):
                self.release()
            raise
        finally:
            timeout.cancel()
            self._queue.remove(entry)
            if not self._queue.size and self._engine_change is not None:
                self._engine_change.cancel()
                self._engine_change = None
            waited_s = perf_counter() - began
            self._metrics.queue_depth.add((self.model,), -1)
            self._metrics.queue_wait.observe((self.model,), waited_s)
        if not has_slot:
            reason = f"no slot of model {self.model!r} became free within {timeout_s:.3g} s"
            raise self._overloaded(reason, perf_counter())
        if expected_s:
            self._metrics.queue_wait_ratio.observe((self.model,), waited_s / expected_s)
        return waited_s, entry

    def correct(self, entry: QueueEntry[asyncio.Future[bool]], tokens: float) -> None:
        """Note what a request took that had to wait, in place of its estimate."""
        self._queue.correct(entry, tokens)
        if entry.flow.waiting:
            self._fairness.record(entry.flow.key, entry.span, perf_counter())

    @property
    def fairness(self) -> float | None:
        """How evenly keys are served that wait; None: there are no two (`fairness.py`)."""
        return self._fairness.value(perf_counter())

    def _expect_in_time(
        self, key_id: str, priority: int, deadline: float, now: float
    ) -> float | None:
        """Return how long a new request will wait, in seconds; None: it is not known.

        Raises EngineOverloaded for one that may well wait beyond its deadline: under a load that
        lasts, all that are let in wait about as long as it allows, and half of them too long.
        """
        ahead = self._queue.count_ahead(key_id, priority, deadline)
        expected_s = self._service_rate.expected_wait_s(ahead, now) if self._queue.size else None
        likely_s = self._service_rate.likely_wait_s(ahead, expected_s) if expected_s else 0.0
        if now + likely_s < deadline:
            return expected_s
        if expected_s is None:
            reason = f"the deadline is over before model {self.model!r} has a free slot"
            raise self._overloaded(reason, now)
        raise _overloaded(
            f"the request would wait for about {expected_s:.2f} s for model {self.model!r}, "
            f"perhaps {likely_s:.2f} s, longer than its deadline allows",
            bounded_retry_s(expected_s),
        )

    def suspend(self) -> None:
        """Note that a request which holds a slot is at no engine; another suspended one may be."""
        self.suspended += 1
        self._freed.notify()

    async def wait_for_room(self) -> None:
        """Return when the engines have room for a suspended request.

        Its slot is held, so no new request takes the room; several that wait are no queue, since
        each of them was admitted before.
        """
        while not self._has_room(self.in_flight - self.suspended):
            changes = (self._freed.next(), self._engine_changes.next())
            try:
                await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for change in changes:
                    change.cancel()

    def release(self) -> None:
        """Give a slot back, once; the next waiting request has it when this returns."""
        self.in_flight -= 1
        self.ended += 1
        if self.suspended:
            self._freed.notify()
        if self._queue.size:
            self._grant_slots()
        # Last: a queue in which a request waits is never idle.
        if self._idle is not None and not self.in_flight:
            self._idle.set()
            self._idle = None

    def _make_room(self, key_id: str, priority: int, now: float) -> None:
        """Refuse a waiting request instead of a new one of this key. Raises EngineOverloaded."""
        error = self._overloaded(f"the queue of model {self.model!r} is full", now)
        displaced = self._queue.find_displaced(key_id, priority)
        if displaced is None:
            raise error
        self._queue.remove(displaced)
        if not displaced.item.done():  # canceled or timed out, and its task has not run yet
            displaced.item.set_exception(error)

    def _has_capacity(self) -> bool:
        return self._has_room(self.in_flight)

    def _has_room(self, in_flight: int) -> bool:
        """Return whether the engines take a request more than so many."""
        return (
            self._max_in_flight is None
            or not in_flight
            or in_flight < self._count_slots(self._max_in_flight)
        )

    def _grant_slots(self) -> None:
        """Give each free slot to the next waiting request."""
        while (entry := self._queue.peek()) is not None:
            if entry.item.done():  # canceled or timed out, and its task has not run yet
                self._queue.remove(entry)
            elif self._has_capacity():
                self._queue.pop()
                self._service_rate.record_served(perf_counter())
                self.in_flight += 1
                entry.item.set_result(True)
            else:
                return

    def _watch_engines(self) -> None:
        if self._engine_change is None:
            self._engine_change = self._engine_changes.next()
            self._engine_change.add_done_callback(self._on_engine_change)

    def _on_engine_change(self, change: asyncio.Future[None]) -> None:
        """Grant the slots of an engine that became READY; keep watching while requests wait."""
        if change is not self._engine_change:
            return  # the queue was empty since, so this watch has ended
        self._engine_change = None
        self._grant_slots()
        if self._queue.size:
            self._watch_engines()

    def _overloaded(self, reason: str, now: float) -> EngineOverloaded:
        return _overloaded(reason, self._service_rate.retry_after_s(self._queue.size, now))


def _overloaded(reason: str, retry_after_s: int) -> EngineOverloaded:
    error = EngineOverloaded(f"{reason}; try again in {retry_after_s} s")
    error.retry_after_s = retry_after_s
    return error


def _was_granted(granted: asyncio.Future[bool]) -> bool:
    if not granted.done() or granted.cancelled():
        return False
    return granted.exception() is None and granted.result()


def _time_out(granted: asyncio.Future[bool]) -> None:
    if not granted.done():
        granted.set_result(False)
