"""What becomes of requests when Redis is stopped, hangs, forgets, refuses or was never there."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import redis

from app.limits.limiter import Limiter
from app.limits.terms import Ask
from app.telemetry.metrics import Metrics
from tests.app.limits.asks import ask, limits
from tests.app.limits.limiters import at_once, limiter_on, metric, outcome, passes, until
from tests.gateway import free_port
from tests.services import RedisServer

pytestmark = [pytest.mark.services, pytest.mark.slow]

ANY = ask(limits(10**6, 10**9, 10**6))
POLICIES = ["local", "open", "closed"]
# What a request meets while Redis does not answer.
MEANWHILE = {"local": "passed", "open": "passed", "closed": "service_unavailable"}


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    """A Redis of the test's own, which it may harm."""
    server = RedisServer()
    try:
        await asyncio.to_thread(server.start)
        yield server
    finally:
        await asyncio.to_thread(server.remove)


@dataclass
class Gateway:
    """A limiter and what it tells its operator."""

    limiter: Limiter
    metrics: Metrics
    caplog: pytest.LogCaptureFixture

    @property
    def available(self) -> bool:
        return metric(self.metrics, "gateway_redis_available") == 1

    @property
    def errors(self) -> int:
        return int(metric(self.metrics, "gateway_redis_errors_total"))

    @property
    def log(self) -> list[str]:
        return [
            record.getMessage()
            for record in self.caplog.records
            if record.name.startswith("app.limits")
        ]

    async def lost(self) -> None:
        """Ask until it is known that Redis does not answer."""
        async with asyncio.timeout(20):
            while self.available:
                await outcome(self.limiter, ANY)

    async def found(self) -> None:
        await until(lambda: self.available)


@dataclass
class Load:
    """Requests of several clients, one after the other each, until it is told to stop."""

    limiter: Limiter
    outcomes: Counter[str] = field(default_factory=Counter)
    going: bool = True

    async def client(self) -> None:
        while self.going:
            self.outcomes[await outcome(self.limiter, ANY)] += 1
            await asyncio.sleep(0.001)


@asynccontextmanager
async def gateway_on(
    url: str,
    caplog: pytest.LogCaptureFixture,
    *,
    policy: str = "closed",
    timeout_s: float = 0.5,
) -> AsyncIterator[Gateway]:
    caplog.set_level(logging.INFO)
    metrics = Metrics()
    async with limiter_on(url, policy=policy, timeout_s=timeout_s, metrics=metrics) as limiter:
        yield Gateway(limiter, metrics, caplog)


# Under load


async def test_redis_is_stopped_and_comes_back(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    for policy in POLICIES:
        async with gateway_on(server.url, caplog, policy=policy) as gateway, loaded(gateway) as load:
            server.stop()
            await gateway.lost()
            await settled(load, MEANWHILE[policy])
            await asyncio.to_thread(server.start)
            await gateway.found()
            await settled(load, "passed")
            assert set(load.outcomes) <= {"passed", MEANWHILE[policy]}
            assert [line.partition(":")[0] for line in gateway.log] == [
                f"Redis at 127.0.0.1", f"Redis at 127.0.0.1"
            ]
            caplog.clear()
