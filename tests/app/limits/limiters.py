"""Limiters on a Redis, as several gateways would have them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from app.errors import GatewayError
from app.limits.limiter import LEASE_S, LimitDecision, Limiter
from app.limits.terms import LimitRequest
from app.settings import LimitsSettings, StateSettings
from app.telemetry.metrics import Metrics

# Far above what a call takes here, however busy the machine is.
PATIENT_S = 10.0


@asynccontextmanager
async def limiter_on(
    url: str,
    prefix: str = "test",
    *,
    policy: Any = "closed",
    timeout_s: float = PATIENT_S,
    lease_s: float = LEASE_S,
    metrics: Metrics | None = None,
) -> AsyncIterator[Limiter]:
    """A limiter as the lifespan runs it; by default, it hides no failure."""
    state = StateSettings.model_validate(
        {"redis_url": url, "redis_prefix": prefix, "redis_timeout_s": timeout_s}
    )
    settings = LimitsSettings(redis_unavailable=policy)
    limiter = Limiter(settings, state, metrics or Metrics(), lease_s=lease_s)
    running = asyncio.create_task(limiter.run())
    try:
        yield limiter
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await limiter.close()


async def passes(limiter: Limiter, request: LimitRequest) -> bool:
    """Return whether a request is admitted; it never ends."""
    return (await limiter.decide(request)).refusal is None


async def outcome(limiter: Limiter, request: LimitRequest) -> str:
    """Return `passed` or the code of the error of a request that ends at once."""
    try:
        with await limiter.decide(request):
            return "passed"
    except GatewayError as error:
        return error.code


def at_once(limiter: Limiter, request: LimitRequest) -> LimitDecision:
    """Return a decision that waits for nothing at all."""
    deciding = limiter.decide(request)
    try:
        deciding.send(None)
    except StopIteration as stopped:
        decision: LimitDecision = stopped.value
        return decision
    deciding.close()
    raise AssertionError("it waits")


def metric(metrics: Metrics, name: str) -> float:
    """Return the value of a series without labels."""
    value = metrics.registry.get_sample_value(name)
    assert value is not None
    return value
