"""Limits counted in Redis, by all gateways together.

Each call runs the script once for everything that has come since the call before: the first request
of an idle gateway goes at once, and those that come while it is under way share the next call.

A slot is held by a lease that ends unless it is renewed, so those of a gateway that died come back.
What a call that failed did to leases is unknown; they are given back when Redis answers again. What
it did to buckets stays, since a refund of what was never charged would let too much through.

A release may wait a moment for a call to share, unless half of what it gives back is taken: then
another gateway may be about to refuse somebody for it.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import NamedTuple

from app.limits.breaker import Event, RedisUnavailable, State, after
from app.limits.redis_connection import Link
from app.limits.script_calls import Release, Renewal, Request, is_scarce, pack, readings
from app.limits.terms import Reading, Terms, undoing

log = logging.getLogger(__name__)

# Redis does nothing else while the script runs, so one call is bounded.
MOST_AT_ONCE = 256
PROBE_S = 1.0
# Requests that come one after the other cost one call each then, not two.
RELEASE_S = 0.002


class _Waiting(NamedTuple):
    """A request that waits for its answer."""

    request: Request
    answer: asyncio.Future[Reading]
    deadline: float


class Grant(NamedTuple):
    """A decision, by which it can be released."""

    lease: str
    reading: Reading


class RedisStore:
    """The store that gateways share, behind a circuit breaker.

    `changed` is called when the breaker opens, with the reason, and when it closes, with None;
    `failed` for each call that fails.
    """

    def __init__(
        self,
        link: Link,
        prefix: str,
        burst_s: float,
        timeout_s: float,
        changed: Callable[[str | None], None],
        failed: Callable[[], None],
        *,
        lease_s: float,
    ) -> None:
        self._link = link
        self._prefix = prefix
        self._burst_s = burst_s
        self._timeout_s = timeout_s
        self._changed = changed
        self._failed = failed
        self._lease_s = lease_s
        self._gateway = secrets.token_hex(6)
        self._leases_made = 0
        self._state = State.CLOSED
        self._opened = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[_Waiting] = []
        self._ended: list[Release] = []
        self._due: list[str] = []  # leases to be renewed
        self._held: dict[str, Terms] = {}

    async def decide(self, terms: Terms) -> Grant:
        """Take all that a request asks for, or nothing. Raises RedisUnavailable.

        One that is cancelled leaves nothing taken.
        """
        if self._state is State.OPEN:
            raise RedisUnavailable("the circuit breaker is open")
        loop = asyncio.get_running_loop()
        self._leases_made += 1
        lease = f"{self._gateway}{self._leases_made:x}"
        answer: asyncio.Future[Reading] = loop.create_future()
        deadline = loop.time() + self._timeout_s
        self._waiting.append(_Waiting(Request(lease, terms), answer, deadline))
        self._wake()
        try:
            return Grant(lease, await answer)
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._take_back(lease, terms, answer.result())  # it came in the same moment
            raise

    def release(self, grant: Grant, terms: Terms, costs: list[float]) -> None:
        """Give the slots of a decision back and charge its buckets what is still due.

        Returns at once; what Redis does not hear now, it hears when it answers again.
        """
        self._held.pop(grant.lease, None)
        if not (terms.slots or any(costs)):
            return
        self._ended.append(Release(grant.lease, terms, costs))
        if is_scarce(terms, grant.reading, self._burst_s):
            self._wake()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RELEASE_S, self._wake)

    async def run(self) -> None:
        """Renew leases and probe, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew(), name="renew leases in Redis")
            tasks.create_task(self._probe(), name="probe Redis")

    async def close(self) -> None:
        """Send what is left to be sent, if Redis answers, and end the connection."""
        self._wake()
        if self._pump is not None:
            await self._pump
        await self._link.close()

    def _take_back(self, lease: str, terms: Terms, reading: Reading) -> None:
        if reading.admitted:
            self.release(Grant(lease, reading), terms, undoing(terms))

    # Calls

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pump is None and self._state is State.CLOSED:
            self._pump = asyncio.get_running_loop().create_task(self._work_off())

    async def _work_off(self) -> None:
        """Make calls until nothing is left to be sent."""
        try:
            while self._state is State.CLOSED and (self._waiting or self._ended or self._due):
                await self._call()
        finally:
            self._pump = None

    async def _call(self) -> None:
        """Make one call for all, or for as many as one may hold.

        Where slots are left to be renewed after it, who waits goes on waiting: a Redis that forgot
        them would give them away.
        """
        ended, self._ended = self._ended[:MOST_AT_ONCE], self._ended[MOST_AT_ONCE:]
        due, self._due = self._due[:MOST_AT_ONCE], self._due[MOST_AT_ONCE:]
        renewals = [Renewal(lease, self._held[lease]) for lease in due if lease in self._held]
        asking = [one for one in self._waiting if not one.answer.done()]  # others were cancelled
        most = 0 if self._due else MOST_AT_ONCE
        waiting, self._waiting = asking[:most], asking[most:]
        requests = [one.request for one in waiting]
        if not (ended or renewals or requests):
            return
        keys, argument = pack(self._prefix, self._burst_s, self._lease_s, ended, renewals, requests)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        if asking:
            deadline = asking[0].deadline  # of the one that has waited longest
        try:
            answers = readings(await self._link.run(keys, argument, deadline), requests)
        except RedisUnavailable as error:
            self._give_up(str(error), waiting, ended)
            return
        except Exception:
            # Whoever waits must be answered, whatever it was.
            log.exception("a call to Redis failed in a way nobody thought of")
            self._give_up("internal error", waiting, ended)
            return
        for (request, answer, _), reading in zip(waiting, answers, strict=True):
            if answer.done():  # cancelled meanwhile
                self._take_back(request.lease, request.terms, reading)
                continue
            if reading.admitted and request.terms.slots:
                self._held[request.lease] = request.terms
            answer.set_result(reading)

    def _give_up(self, reason: str, waiting: list[_Waiting], ended: list[Release]) -> None:
        """Open the breaker: who waits is told at once, and leases are given back later."""
        for one in (*waiting, *self._waiting):
            if not one.answer.done():
                one.answer.set_exception(RedisUnavailable(reason))
        leases = [one.request for one in waiting] + [Request(*one[:2]) for one in ended]
        unknown = [
            Release(lease, terms, [0.0] * len(terms.buckets))
            for lease, terms in leases
            if terms.slots
        ]
        self._ended = unknown + self._ended
        self._waiting.clear()
        self._due.clear()
        self._failed()
        self._move(Event.CALL_FAILED, reason)

    # What happens by itself

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            self._due = list(self._held)
            self._wake()

    async def _probe(self) -> None:
        while True:
            await self._opened.wait()
            await asyncio.sleep(PROBE_S)
            try:
                await self._link.probe(*pack(self._prefix, self._burst_s, self._lease_s))
            except RedisUnavailable as error:
                self._failed()
                self._move(Event.PROBE_FAILED, str(error))
            else:
                self._move(Event.PROBE_SUCCEEDED, None)

    def _move(self, event: Event, reason: str | None) -> None:
        before, self._state = self._state, after(self._state, event)
        if self._state is before:
            return
        if self._state is State.OPEN:
            self._opened.set()
        else:
            self._opened.clear()
            self._due = list(self._held)  # Redis may have forgotten them
            self._wake()
        self._changed(reason)
