"""Limits counted in Redis, shared by all gateways.

Requests are batched: each call runs the script once for everything that arrived during the previous
call. The first request of an idle gateway is sent at once.

A slot is held by a lease that expires unless it is renewed, so the slots of a gateway that died are
released. After a failed call the state of its leases is unknown; they are released when Redis
answers again. Its charges to buckets stay, since a refund of something never charged would admit
too much.

A release may be delayed to share a call, unless half of a limit or more is in use: then another
gateway may be about to refuse a request because of it.

After one failed call the circuit breaker opens: every decision fails at once with RedisUnavailable,
and only the probe talks to Redis. A successful probe closes it. Late failures of other calls change
nothing.
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import NamedTuple

from redis.exceptions import NoScriptError

from app.deadline import deadline
from app.limits.script_calls import LeasedTerms, Release, is_scarce, pack, readings
from app.limits.terms import Reading, Terms
from app.redis import RedisUnavailable
from app.redis.connection import FAULTS, RedisConnection

log = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_name("script.lua")
# Requests of one call: Redis serves nothing else while the script runs.
MAX_BATCH = 256
PROBE_S = 1.0
# Delay of a release, so that consecutive requests cost one call each instead of two.
RELEASE_S = 0.002


class ScriptConnection(RedisConnection):
    """A connection that runs the script, which it sends where Redis does not have it yet."""

    def __init__(self, url: str, timeout_s: float) -> None:
        super().__init__(url, timeout_s)
        self._source = SCRIPT.read_bytes()
        self._sha = hashlib.sha1(self._source, usedforsecurity=False).hexdigest()

    async def run(self, keys: list[bytes], argument: bytes, until: float) -> bytes:
        """Run the script and return its result; `until` is the deadline in the loop's time.

        Raises RedisUnavailable, after which the script may or may not have run.
        """
        arguments: tuple[bytes | int, ...] = (len(keys), *keys, argument)
        try:
            async with deadline(until):
                try:
                    answer: bytes = await self._execute("EVALSHA", self._sha, *arguments)
                except NoScriptError:
                    answer = await self._execute("EVAL", self._source, *arguments)
                return answer
        except FAULTS as error:
            raise RedisUnavailable(await self._fault(error)) from None

    async def probe(self, keys: list[bytes], argument: bytes) -> None:
        """Check that Redis answers and runs the script. Raises RedisUnavailable."""
        until = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with deadline(until):
                await self._execute("PING")
        except FAULTS as error:
            raise RedisUnavailable(await self._fault(error)) from None
        await self.run(keys, argument, until)


class _Waiting(NamedTuple):
    """A request that waits for its decision."""

    request: LeasedTerms
    decided: asyncio.Future[Reading]
    deadline: float


class LeasedReading(NamedTuple):
    """A decision and the lease under which it holds slots."""

    lease: str
    reading: Reading


@dataclass(eq=False, slots=True)
class RedisStore:
    """The store that gateways share, behind a circuit breaker."""

    connection: ScriptConnection
    _: KW_ONLY
    prefix: str
    burst_s: float
    timeout_s: float
    lease_s: float
    # Called with the reason when the breaker opens, and with None when it closes.
    on_change: Callable[[str | None], None]
    on_failure: Callable[[], None]  # after each failed call
    gateway: str = field(init=False, default_factory=lambda: secrets.token_hex(6))
    leases_made: int = field(init=False, default=0)
    breaker_open: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    sender: asyncio.Task[None] | None = field(init=False, default=None)
    timer: asyncio.TimerHandle | None = field(init=False, default=None)
    waiting: list[_Waiting] = field(init=False, default_factory=list)
    ended: list[Release] = field(init=False, default_factory=list)
    due: list[str] = field(init=False, default_factory=list)  # leases to renew
    held: dict[str, Terms] = field(init=False, default_factory=dict)

    async def decide(self, terms: Terms) -> LeasedReading:
        """Admit a request and charge all its limits, or none. Raises RedisUnavailable.

        A canceled call leaves nothing charged.
        """
        if self.breaker_open.is_set():
            raise RedisUnavailable("the circuit breaker is open")
        loop = asyncio.get_running_loop()
        self.leases_made += 1
        lease = f"{self.gateway}{self.leases_made:x}"
        decided: asyncio.Future[Reading] = loop.create_future()
        deadline = loop.time() + self.timeout_s
        self.waiting.append(_Waiting(LeasedTerms(lease, terms), decided, deadline))
        self._start_sending()
        try:
            return LeasedReading(lease, await decided)
        except asyncio.CancelledError:
            if decided.done() and not decided.cancelled() and decided.exception() is None:
                self._undo(lease, terms, decided.result())  # decided in the same turn of the loop
            raise

    def release(self, decision: LeasedReading, terms: Terms, costs: list[float]) -> None:
        """Release the slots of a decision and charge its buckets what is still due.

        Returns at once; while Redis is unavailable the release is queued.
        """
        self.held.pop(decision.lease, None)
        if not (terms.scope.slots or any(costs)):
            return
        self.ended.append(Release(decision.lease, terms, costs))
        if is_scarce(terms, decision.reading, self.burst_s):
            self._start_sending()
        elif self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(RELEASE_S, self._start_sending)

    async def run(self) -> None:
        """Renew leases and probe until canceled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew(), name="renew leases in Redis")
            tasks.create_task(self._probe(), name="probe Redis")

    async def close(self) -> None:
        """Send what is queued, if Redis answers, and close the connection."""
        self._start_sending()
        if self.sender is not None:
            await self.sender
        await self.connection.close()

    def _undo(self, lease: str, terms: Terms, reading: Reading) -> None:
        if reading.admitted:
            refunds = [-cost_s for cost_s in terms.costs.values()]
            self.release(LeasedReading(lease, reading), terms, refunds)

    # Calls

    def _start_sending(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.sender is None and not self.breaker_open.is_set():
            self.sender = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        """Make calls until the queues are empty."""
        try:
            while not self.breaker_open.is_set() and (self.waiting or self.ended or self.due):
                await self._call()
        finally:
            self.sender = None

    async def _call(self) -> None:
        """Make one call for the whole queue, up to MAX_BATCH of each kind.

        While leases remain to be renewed, requests keep waiting: a Redis that lost the leases would
        give their slots away.
        """
        ended, self.ended = self.ended[:MAX_BATCH], self.ended[MAX_BATCH:]
        due, self.due = self.due[:MAX_BATCH], self.due[MAX_BATCH:]
        renewals = [LeasedTerms(lease, self.held[lease]) for lease in due if lease in self.held]
        pending = [one for one in self.waiting if not one.decided.done()]  # not canceled
        limit = 0 if self.due else MAX_BATCH
        waiting, self.waiting = pending[:limit], pending[limit:]
        requests = [one.request for one in waiting]
        if not (ended or renewals or requests):
            return
        keys, argument = pack(self.prefix, self.burst_s, self.lease_s, ended, renewals, requests)
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        if pending:
            deadline = pending[0].deadline  # of the request that has waited longest
        try:
            decisions = readings(await self.connection.run(keys, argument, deadline), requests)
        except RedisUnavailable as error:
            self._give_up(str(error), waiting, ended)
            return
        except Exception:
            # Every waiting request must get an answer, whatever the fault.
            log.exception("unhandled exception in a call to Redis")
            self._give_up("internal error", waiting, ended)
            return
        for (request, decided, _), reading in zip(waiting, decisions, strict=True):
            if decided.done():  # canceled meanwhile
                self._undo(request.lease, request.terms, reading)
                continue
            if reading.admitted and request.terms.scope.slots:
                self.held[request.lease] = request.terms
            decided.set_result(reading)

    def _give_up(self, reason: str, waiting: list[_Waiting], ended: list[Release]) -> None:
        """Open the breaker: fail waiting requests at once, and release their leases later."""
        for one in (*waiting, *self.waiting):
            if not one.decided.done():
                one.decided.set_exception(RedisUnavailable(reason))
        leases = [one.request for one in waiting] + [LeasedTerms(*one[:2]) for one in ended]
        unknown = [
            Release(lease, terms, [0.0] * len(terms.scope.buckets))
            for lease, terms in leases
            if terms.scope.slots
        ]
        self.ended = unknown + self.ended
        self.waiting.clear()
        self.due.clear()
        self.on_failure()
        self._open_breaker(reason)

    # Background tasks

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 3)
            self.due = list(self.held)
            self._start_sending()

    async def _probe(self) -> None:
        while True:
            await self.breaker_open.wait()
            await asyncio.sleep(PROBE_S)
            try:
                await self.connection.probe(*pack(self.prefix, self.burst_s, self.lease_s))
            except RedisUnavailable as error:
                self.on_failure()
                self._open_breaker(str(error))
            else:
                self._close_breaker()

    def _open_breaker(self, reason: str) -> None:
        if not self.breaker_open.is_set():
            self.breaker_open.set()
            self.on_change(reason)

    def _close_breaker(self) -> None:
        if self.breaker_open.is_set():
            self.breaker_open.clear()
            self.due = list(self.held)  # Redis may have lost them
            self._start_sending()
            self.on_change(None)
