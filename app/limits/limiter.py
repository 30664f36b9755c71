"""Whether a request may begin by the limits of its key, owner and model, and what it really used.

Limits are counted in this process, or in Redis by several gateways together. While Redis does not
answer, `limits.redis_unavailable` says what happens; a decision is released where it was made.
"""

import logging
from collections.abc import Callable
from functools import partial
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from app.errors import Headers, RateLimited, ServiceUnavailable
from app.limits import rate_headers
from app.limits.breaker import RedisUnavailable
from app.limits.memory_store import MemoryStore
from app.limits.terms import (
    NO_TERMS,
    NOTHING_TAKEN,
    LimitRequest,
    Reading,
    Scopes,
    Terms,
    settlement,
)
from app.settings import LimitsSettings, StateSettings
from app.telemetry.metrics import Metrics

if TYPE_CHECKING:  # redis-py is imported only where limits are counted there: 9 MiB
    from app.limits.redis_store import Grant, RedisStore

log = logging.getLogger(__name__)

# A gateway that dies holds its slots for that long at most; three renewals fit in, so one may fail.
LEASE_S = 25.0

MEANWHILE = {
    "local": "this gateway counts limits for itself until it does",
    "open": "nothing is limited until it does",
    "closed": "requests are refused until it does",
}


class Decision(msgspec.Struct, gc=False, eq=False):
    """The answer to one request, held while the request is under way.

    Entering raises the refusal, if there is one. Leaving, exactly once, gives the slot back and
    settles the tokens: all that were reserved go back, less those that `settle` was told of.
    """

    terms: Terms
    reading: Reading
    burst_s: float
    # Gives back what was taken, but for the tokens that were used. None: nothing is held.
    release: Callable[[Terms, float], None] | None
    used: float = 0.0

    @property
    def refusal(self) -> RateLimited | None:
        """Why the request may not begin; None: it may."""
        return rate_headers.refusal(self.terms, self.reading, self.burst_s)

    @property
    def headers(self) -> Headers:
        """What a response says of the caller's limits."""
        return rate_headers.headers(self.terms, self.reading, self.burst_s)

    @property
    def header_lines(self) -> bytes:
        """The same as the lines of a response."""
        return rate_headers.header_lines(self.terms, self.reading, self.burst_s)

    def settle(self, tokens: float) -> None:
        """Say how many tokens the request really used; without this it used none."""
        self.used = tokens

    def keep(self) -> None:
        """Say that the request used what was reserved."""
        self.used = float(self.terms.tokens)

    def __enter__(self) -> Self:
        if self.reading.admitted:
            return self
        refusal = self.refusal
        assert refusal is not None
        raise refusal

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        release = self.release
        if release is not None:
            self.release = None
            release(self.terms, self.used)


class Limiter:
    """Decides on requests; `run` and `close` belong to the lifespan."""

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
        self._scopes = Scopes(settings.burst_s)
        self._memory = MemoryStore(settings.burst_s)
        self._release = self._release_here  # made once
        self._redis: RedisStore | None = None
        if state.redis_url is not None:
            from app.limits import redis_connection
            from app.limits import redis_store as redis

            self._link = redis_connection.Link(
                state.redis_url.get_secret_value(), state.redis_timeout_s
            )
            self._redis = redis.RedisStore(
                self._link,
                state.redis_prefix,
                settings.burst_s,
                state.redis_timeout_s,
                self._redis_changed,
                metrics.redis_errors.add,
                lease_s=lease_s,
            )
            metrics.redis_available.set((), 1)

    def decide_at_once(self, ask: LimitRequest) -> Decision | None:
        """Take all that a request asks for, or nothing; None: Redis must be asked, `decide` it."""
        if self._redis is not None:
            return None
        terms = self._scopes.terms(ask)
        reading = self._memory.decide(terms, monotonic())
        return Decision(terms, reading, self._burst_s, self._release)

    async def decide(self, ask: LimitRequest) -> Decision:
        """Take all that a request asks for, or nothing.

        Raises ServiceUnavailable while Redis does not answer, where the policy is `closed`.
        """
        terms = self._scopes.terms(ask)
        redis = self._redis
        if redis is None or not (terms.buckets or terms.slots):
            return self._decide_here(terms)
        try:
            grant = await redis.decide(terms)
        except RedisUnavailable:
            if self._policy == "local":
                return self._decide_here(terms)
            if self._policy == "open":
                return Decision(NO_TERMS, NOTHING_TAKEN, self._burst_s, None)
            raise ServiceUnavailable("limits cannot be checked at the moment; try again") from None
        return Decision(terms, grant.reading, self._burst_s, partial(_release_there, redis, grant))

    async def run(self) -> None:
        """Do what must happen by itself while Redis is used, until cancelled."""
        if self._redis is not None:
            await self._redis.run()

    async def close(self) -> None:
        """Send what Redis has yet to hear and end the connection."""
        if self._redis is not None:
            await self._redis.close()

    def _decide_here(self, terms: Terms) -> Decision:
        reading = self._memory.decide(terms, monotonic())
        return Decision(terms, reading, self._burst_s, self._release)

    def _release_here(self, terms: Terms, tokens: float) -> None:
        self._memory.release(terms, tokens, monotonic())

    def _redis_changed(self, reason: str | None) -> None:
        self._metrics.redis_available.set((), reason is None)
        if reason is None:
            log.info("%s answers; limits are counted there", self._link)
        else:
            log.error("%s does not answer: %s; %s", self._link, reason, MEANWHILE[self._policy])


def _release_there(redis: "RedisStore", grant: "Grant", terms: Terms, tokens: float) -> None:
    redis.release(grant, terms, settlement(terms, tokens))
