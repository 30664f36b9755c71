"""Decides whether the limits of key, owner and model admit a request, and settles its usage.

Limits are counted in this process, or in Redis for several gateways together. While Redis is
unavailable, `limits.redis_unavailable` applies. A decision is released in the store that made it.
"""

import logging
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Self

import msgspec

from app.errors import Headers, RateLimited, ServiceUnavailable
from app.limits import rate_responses
from app.limits.memory_store import MemoryStore
from app.limits.terms import (
    NO_TERMS,
    NOTHING_TAKEN,
    LimitRequest,
    Reading,
    Scope,
    Terms,
    scope_of,
    settlement,
    terms_of,
)
from app.limits.use import LimitUse, limit_uses, reading_terms
from app.redis import RedisUnavailable
from app.settings import NO_LIMITS, LimitSettings, LimitsSettings, StateSettings
from app.telemetry.metrics import Metrics

if TYPE_CHECKING:  # redis-py is imported only where limits are counted there: 9 MiB
    from app.limits.redis_store import RedisStore

log = logging.getLogger(__name__)

# Seconds of unused reads that a key keeps.
READ_BURST_S = 60.0

# A gateway that dies holds its slots for this long at most; of three renewals in it, one may fail.
LEASE_S = 25.0

OUTAGE_CONSEQUENCES = {
    "local": "this gateway counts limits for itself until it is available",
    "open": "limits are not enforced until it is available",
    "closed": "requests are refused until it is available",
}


class LimitDecision(msgspec.Struct, gc=False, eq=False):
    """The decision on one request, held while the request is in flight.

    Entering raises the refusal, if any. Leaving, exactly once, releases the slots and settles the
    tokens: the reserved ones are refunded, except those in `used`.
    """

    terms: Terms
    reading: Reading
    burst_s: float
    # Releases slots and refunds unused tokens at a monotonic time. None: nothing is held.
    release: Callable[[Terms, float, float], None] | None
    # Tokens that the request has used.
    used: float = 0.0

    @property
    def refusal(self) -> RateLimited | None:
        """The error that refuses the request; None: it is admitted."""
        return rate_responses.refusal(self.terms, self.reading, self.burst_s)

    @property
    def headers(self) -> Headers:
        """The rate-limit headers of the response."""
        return rate_responses.headers(self.terms, self.reading, self.burst_s)

    @property
    def header_lines(self) -> bytes:
        """The same as encoded lines."""
        return rate_responses.header_lines(self.terms, self.reading, self.burst_s)

    def __enter__(self) -> Self:
        if self.reading.admitted:
            return self
        refusal = self.refusal
        assert refusal is not None
        raise refusal

    def __exit__(self, *_: object) -> None:
        release = self.release
        if release is not None:
            self.release = None
            release(self.terms, self.used, monotonic())


class Limiter:
    """Decides on requests; the lifespan calls `run` and `close`."""

    def __init__(
        self,
        settings: LimitsSettings,
        state: StateSettings,
        metrics: Metrics,
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self._burst_s = settings.burst_s
        self._policy = settings.redis_unavailable
        self._metrics = metrics
        self._memory = MemoryStore(settings.burst_s)
        self._release = self._memory.release  # one bound method for all decisions
        self._redis: RedisStore | None = None
        if state.redis_url is not None:
            from app.limits import redis_store as redis

            self._connection = redis.ScriptConnection(
                state.redis_url.get_secret_value(), state.redis_timeout_s
            )
            self._redis = redis.RedisStore(
                self._connection,
                prefix=state.redis_prefix,
                burst_s=settings.burst_s,
                timeout_s=state.redis_timeout_s,
                lease_s=lease_s,
                on_change=self._redis_changed,
                on_failure=metrics.redis_errors.add,
            )
            metrics.redis_available.set((), 1)

    def scope(self, request: LimitRequest) -> Scope:
        """Return the limits of all requests that differ from this one only in their tokens."""
        return scope_of(request, self._burst_s)

    def decide_at_once(self, terms: Terms) -> LimitDecision | None:
        """Decide now. Returns None if Redis must be asked: see `decide`."""
        if self._redis is not None:
            return None
        reading = self._memory.decide(terms, monotonic())
        return LimitDecision(terms, reading, self._burst_s, self._release)

    async def decide(self, request: LimitRequest) -> LimitDecision:
        """Admit a request and charge all its limits, or none; see `decide_terms`."""
        return await self.decide_terms(terms_of(request, self._burst_s))

    async def decide_terms(self, terms: Terms) -> LimitDecision:
        """Admit a request with these limits and charge them all, or none.

        Raises ServiceUnavailable while Redis is unavailable and the policy is `closed`.
        """
        redis = self._redis
        if redis is None or not (terms.scope.buckets or terms.scope.slots):
            return self._decide_in_memory(terms)
        try:
            decision = await redis.decide(terms)
        except RedisUnavailable:
            if self._policy == "local":
                return self._decide_in_memory(terms)
            if self._policy == "open":
                return LimitDecision(NO_TERMS, NOTHING_TAKEN, self._burst_s, None)
            raise ServiceUnavailable("limits cannot be checked at the moment; try again") from None

        def release(terms: Terms, tokens: float, _: float) -> None:
            redis.release(decision, terms, settlement(terms, tokens))

        return LimitDecision(terms, decision.reading, self._burst_s, release)

    async def uses(self, request: LimitRequest) -> list[LimitUse] | None:
        """Return how much of each limit of a request is in use now. Nothing is charged.

        None while Redis is unavailable and the policy is not `local`.
        """
        terms = reading_terms(request, self._burst_s)
        redis = self._redis
        if not (terms.scope.buckets or terms.scope.slots):
            return []
        reading = None
        if redis is not None:
            try:
                reading = (await redis.decide(terms)).reading
            except RedisUnavailable:
                if self._policy != "local":
                    return None
        reading = reading or self._memory.decide(terms, monotonic())
        return limit_uses(request, reading, self._burst_s)

    async def run(self) -> None:
        """Renew leases and probe Redis, if it is used, until canceled."""
        if self._redis is not None:
            await self._redis.run()

    async def close(self) -> None:
        """Send queued releases to Redis and close the connection."""
        if self._redis is not None:
            await self._redis.close()

    def _decide_in_memory(self, terms: Terms) -> LimitDecision:
        reading = self._memory.decide(terms, monotonic())
        return LimitDecision(terms, reading, self._burst_s, self._release)

    def _redis_changed(self, reason: str | None) -> None:
        self._metrics.redis_available.set((), reason is None)
        if reason is None:
            log.info("%s is available; limits are counted there", self._connection)
        else:
            consequence = OUTAGE_CONSEQUENCES[self._policy]
            log.error("%s is unavailable: %s; %s", self._connection, reason, consequence)


class ReadLimiter:
    """Limits the reads of each key: GET requests, which do not count against its limits.

    Clients list the models at every start, and a key at its limit must be able to find out why. But
    one of these reads queries the database, so their rate is limited too: each key may make as many
    reads per minute as requests, counted separately and per gateway, since Redis would cost more
    than the read.
    """

    def __init__(
        self, clock: Callable[[], float] = monotonic, burst_s: float = READ_BURST_S
    ) -> None:
        """`burst_s`: seconds of unused reads that a key keeps."""
        self._store = MemoryStore(burst_s)
        self._burst_s = burst_s
        self._clock = clock

    def refusal(self, key_id: str, limits: LimitSettings) -> RateLimited | None:
        """Count a read; return its refusal, or None if it is admitted."""
        reads = LimitSettings(requests_per_minute=limits.requests_per_minute)
        terms = terms_of(LimitRequest(key_id, reads, "", NO_LIMITS, 0, concurrent=False))
        reading = self._store.decide(terms, self._clock())
        return rate_responses.refusal(terms, reading, self._burst_s)
