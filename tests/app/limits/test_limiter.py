"""Limits as the relay meets them, counted in memory."""

import pytest

from app.errors import RateLimited
from app.limits.limiter import Limiter
from app.limits.terms import Ask
from app.settings import LimitSettings, LimitsSettings, StateSettings
from app.telemetry.metrics import Metrics

NONE = LimitSettings()


def ask(key: LimitSettings = NONE, model: LimitSettings = NONE, tokens: int = 10) -> Ask:
    return Ask("k", key, "demo", model, tokens)


@pytest.fixture
def limiter() -> Limiter:
    return Limiter(LimitsSettings(), StateSettings(), Metrics())


async def test_one_request_a_minute_is_one(limiter: Limiter) -> None:
    wanted = ask(LimitSettings(requests_per_minute=1))
    with await limiter.decide(wanted) as decision:
        assert (b"x-ratelimit-remaining-requests", b"0") in decision.headers
    with pytest.raises(RateLimited) as caught, await limiter.decide(wanted):
        pass
    assert caught.value.limit == "requests"
    assert caught.value.retry_after_s == 60
