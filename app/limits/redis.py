"""Limits counted in Redis, by all gateways together.

Each call runs the script once for everything that has come since the call before: the first request
of an idle gateway goes at once, and those that come while it is under way share the next call.

A slot is held by a lease that ends unless it is renewed, so those of a gateway that died come back.
What a call that failed did to leases is unknown; they are given back when Redis answers again. What
it did to buckets stays, since a refund of what was never charged would let too much through.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from app.limits.breaker import Event, State, after
from app.limits.link import Link, RedisUnavailable
from app.limits.terms import Reading, Terms, undoing

# A gateway that dies holds its slots for that long at most; three renewals fit in, so one may fail.
LEASE_S = 25.0
# Redis does nothing else meanwhile: 5 ms or so.
MOST_AT_ONCE = 256
PROBE_S = 1.0

_encode = msgspec.msgpack.Encoder().encode


class _Asked(NamedTuple):
    """A request that waits for its answer."""

    lease: str
    terms: Terms
    answer: asyncio.Future[Reading]
    deadline: float


class _Released(NamedTuple):
    """A lease that has ended, and what its buckets are still to be charged."""

    lease: str
    terms: Terms
    costs: list[float]


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
        lease_s: float = LEASE_S,
    ) -> None:
        self._link = link
        # In a cluster all keys with one hash tag are in one place.
        self._prefix = f"{{{prefix}}}:"
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
        self._asked: list[_Asked] = []
        self._released: list[_Released] = []
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
        self._asked.append(_Asked(lease, terms, answer, loop.time() + self._timeout_s))
        self._wake()
        try:
            return Grant(lease, await answer)
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._take_back(lease, terms, answer.result())  # it came in the same moment
            raise

    def release(self, grant: Grant, terms: Terms, costs: list[float]) -> None:
        """Give the slots of a decision back and charge its buckets what is still due, soon."""
        self._held.pop(grant.lease, None)
        if terms.slots or any(costs):
            self._released.append(_Released(grant.lease, terms, costs))
            self._wake()

    async def run(self) -> None:
        """Renew leases and probe, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew(), name="renew leases in Redis")
            tasks.create_task(self._probe(), name="probe Redis")

    async def close(self) -> None:
        """Send what is left to be sent, if Redis answers, and end the connection."""
        if self._pump is not None:
            await self._pump
        await self._link.close()

    def _take_back(self, lease: str, terms: Terms, reading: Reading) -> None:
        if reading.admitted:
            self.release(Grant(lease, reading), terms, undoing(terms))

    # Calls

    def _wake(self) -> None:
        if self._pump is None and self._state is State.CLOSED:
            self._pump = asyncio.get_running_loop().create_task(self._work_off())

    async def _work_off(self) -> None:
        """Make calls until nothing is left to be sent."""
        try:
            while self._state is State.CLOSED and (self._asked or self._released or self._due):
                await self._call()
        finally:
            self._pump = None

    async def _call(self) -> None:
        """Make one call for all, or for as many as one may hold."""
        asked, self._asked = self._asked[:MOST_AT_ONCE], self._asked[MOST_AT_ONCE:]
        released, self._released = self._released[:MOST_AT_ONCE], self._released[MOST_AT_ONCE:]
        due, self._due = self._due[:MOST_AT_ONCE], self._due[MOST_AT_ONCE:]
        asked = [one for one in asked if not one.answer.done()]  # the others were cancelled
        renewed = [(lease, self._held[lease]) for lease in due if lease in self._held]
        if not (asked or released or renewed):
            return
        keys, argument = self._pack(released, asked, renewed)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        if asked:
            deadline = asked[0].deadline  # the one that has waited longest
        try:
            answers = msgspec.msgpack.decode(await self._link.run(keys, argument, deadline))
        except (RedisUnavailable, msgspec.DecodeError) as error:
            self._give_up(str(error), asked, released)
            return
        # Lua has one kind of table: where there are no answers, this is not a list.
        for one, answer in zip(asked, answers or (), strict=True):
            self._answer(one, answer)

    def _answer(self, one: _Asked, answer: list[Any]) -> None:
        slots = len(one.terms.slots)
        reading = Reading(answer[0], answer[1 + slots :], answer[1 : 1 + slots])
        if one.answer.done():  # cancelled meanwhile
            self._take_back(one.lease, one.terms, reading)
            return
        if reading.admitted and slots:
            self._held[one.lease] = one.terms
        one.answer.set_result(reading)

    def _give_up(self, reason: str, asked: list[_Asked], released: list[_Released]) -> None:
        """Open the breaker: who waits is told at once, and leases are given back later."""
        for one in (*asked, *self._asked):
            if not one.answer.done():
                one.answer.set_exception(RedisUnavailable(reason))
        leases = [_Released(one.lease, one.terms, [0.0] * len(one.terms.buckets)) for one in asked]
        leases += [one._replace(costs=[0.0] * len(one.costs)) for one in released]
        self._released = [one for one in leases if one.terms.slots] + self._released
        self._asked.clear()
        self._due.clear()
        self._failed()
        self._move(Event.CALL_FAILED, reason)

    def _pack(
        self,
        released: Sequence[_Released] = (),
        asked: Sequence[_Asked] = (),
        renewed: Sequence[tuple[str, Terms]] = (),
    ) -> tuple[list[bytes], bytes]:
        """Return the script's KEYS and its argument."""
        places: list[str] = ["clock"]
        for terms in (*(one.terms for one in released), *(one.terms for one in asked)):
            places += [slot.place for slot in terms.slots]
            places += [bucket.place for bucket in terms.buckets]
        for _, terms in renewed:
            places += [slot.place for slot in terms.slots]
        work = (
            self._burst_s,
            self._lease_s,
            [(one.lease, len(one.terms.slots), one.costs) for one in released],
            [
                (
                    one.lease,
                    [slot.limit for slot in one.terms.slots],
                    [bucket.cost_s for bucket in one.terms.buckets],
                )
                for one in asked
            ],
            [(lease, len(terms.slots)) for lease, terms in renewed],
        )
        prefix = self._prefix
        # A name from a YAML file may hold what UTF-8 does not.
        return [(prefix + place).encode("utf-8", "surrogatepass") for place in places], _encode(
            work
        )

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
                await self._link.probe(*self._pack())
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
