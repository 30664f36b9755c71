"""Fixtures of the limits: a limiter over each store."""

import secrets
from collections.abc import AsyncIterator

import pytest

from app.limits.limiter import Limiter
from app.settings import LimitsSettings, StateSettings
from app.telemetry.metrics import Metrics
from tests.app.limits.limiters import limiter_on
from tests.services import RedisServer


@pytest.fixture
def prefix() -> str:
    return secrets.token_hex(8)


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.services)])
async def limiter(request: pytest.FixtureRequest, prefix: str) -> AsyncIterator[Limiter]:
    """A limiter, once over each store."""
    if request.param == "memory":
        yield Limiter(LimitsSettings(), StateSettings(), Metrics())
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    async with limiter_on(server.url, prefix) as limiter:
        yield limiter
