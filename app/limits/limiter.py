"""Whether a request may begin by the limits of its key and model, and what it really used.

Limits are counted in this process, or in Redis by several gateways together. While Redis does not
answer, `limits.redis_unavailable` says what happens; a decision is released where it was made.
"""

import logging
from collections.abc import Callable
from functools import partial
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self

from app.errors import Headers, RateLimited, ServiceUnavailable
from app.limits import judgement
from app.limits.breaker import RedisUnavailable
from app.limits.memory import MemoryStore
from app.limits.terms import Ask, Reading, Scopes, Terms, settlement
from app.settings import LimitsSettings, StateSettings
from app.telemetry.metrics import Metrics

if TYPE_CHECKING:  # redis-py is imported only where limits are counted there: 9 MiB
    from app.limits.redis import RedisStore

log = logging.getLogger(__name__)

# A gateway that dies holds its slots for that long at most; three renewals fit in, so one may fail.
LEASE_S = 25.0

MEANWHILE = {
    "local": "this gateway counts limits for itself until it does",
    "open": "nothing is limited until it does",
    "closed": "requests are refused until it does",
}


class Decision:
    """The answer to one request, held while the request is under way.

    Entering raises the refusal, if there is one. Leaving, exactly once, gives the slot back and
    settles the tokens: all that were reserved go back, less those that `settle` was told of.
    """

    __slots__ = ("_release", "_terms", "_used", "headers", "refusal")

    def __init__(
        self,
        terms: Terms,
        headers: Headers,
        refusal: RateLimited | None,
        release: Callable[[Terms, list[float]], None] | None,
    ) -> None:
        self.headers = headers
        self.refusal = refusal
        self._terms = terms
        self._used = 0.0
        self._release = release  # None: nothing was taken, or it was given back

    def settle(self, tokens: float) -> None:
        """Say how many tokens the request really used; without this it used none."""
        self._used = tokens

    def keep(self) -> None:
        """Say that the request used what was reserved."""
        self._used = float(self._terms.tokens)

    def __enter__(self) -> Self:
        if self.refusal is not None:
            raise self.refusal
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        release, self._release = self._release, None
        if release is not None:
            release(self._terms, settlement(self._terms, self._used))


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
        self._redis: RedisStore | None = None
        if state.redis_url is not None:
            from app.limits import link, redis

            self._link = link.Link(state.redis_url.get_secret_value(), state.redis_timeout_s)
            self._redis = redis.RedisStore(
                self._link,
                state.redis_prefix,
                settings.burst_s,
                state.redis_timeout_s,
                self._redis_changed,
                metrics.redis_error,
                lease_s=lease_s,
            )
            metrics.redis_available(True)

    async def decide(self, ask: Ask) -> Decision:
        """Take all that a request asks for, or nothing.

        Raises ServiceUnavailable while Redis does not answer, where the policy is `closed`.
        """
        terms = self._scopes.terms(ask)
        if self._redis is None or not (terms.buckets or terms.slots):
            return self._decide_here(terms)
        try:
            grant = await self._redis.decide(terms)
        except RedisUnavailable:
            if self._policy == "local":
                return self._decide_here(terms)
            if self._policy == "open":
                return Decision(terms, [], None, None)
            raise ServiceUnavailable("limits cannot be checked at the moment; try again") from None
        return self._decision(terms, grant.reading, partial(self._redis.release, grant))

    async def run(self) -> None:
        """Do what must happen by itself while Redis is used, until cancelled."""
        if self._redis is not None:
            await self._redis.run()

    async def close(self) -> None:
        """Send what Redis has yet to hear and end the connection."""
        if self._redis is not None:
            await self._redis.close()

    def _decide_here(self, terms: Terms) -> Decision:
        return self._decision(terms, self._memory.decide(terms, monotonic()), self._release_here)

    def _release_here(self, terms: Terms, costs: list[float]) -> None:
        self._memory.release(terms, costs, monotonic())

    def _decision(
        self, terms: Terms, reading: Reading, release: Callable[[Terms, list[float]], None]
    ) -> Decision:
        return Decision(
            terms,
            judgement.headers(terms, reading, self._burst_s),
            judgement.refusal(terms, reading, self._burst_s),
            release if reading.admitted else None,
        )

    def _redis_changed(self, reason: str | None) -> None:
        self._metrics.redis_available(reason is None)
        if reason is None:
            log.info("%s answers; limits are counted there", self._link)
        else:
            log.error("%s does not answer: %s; %s", self._link, reason, MEANWHILE[self._policy])
