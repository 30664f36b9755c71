"""How much of its limits a key uses, read without a charge, over both stores."""

import pytest

from app.auth import Owner
from app.limits.limiter import Limiter
from app.limits.terms import LimitRequest
from app.limits.use import LimitUse
from app.settings import NO_LIMITS, LimitSettings
from tests.app.limits.limiters import limiter_on
from tests.gateway import free_port

KEY = LimitSettings(requests_per_minute=10, tokens_per_minute=600, concurrent_requests=2)


def request(tokens: int = 0, owner: Owner | None = None) -> LimitRequest:
    return LimitRequest("key-1", KEY, "", NO_LIMITS, tokens, owner=owner)


async def uses(limiter: Limiter, of: LimitRequest | None = None) -> list[LimitUse]:
    found = await limiter.uses(of or request())
    assert found is not None
    return found


async def used(limiter: Limiter) -> dict[str, int]:
    return {use.kind: use.used for use in await uses(limiter)}


async def test_use_is_what_requests_in_flight_hold(limiter: Limiter) -> None:
    assert await used(limiter) == {"requests": 0, "tokens": 0, "concurrency": 0}
    with await limiter.decide(request(300)):
        found = await uses(limiter)
        assert [(use.kind, use.used, use.most) for use in found] == [
            ("requests", 1, 10), ("tokens", 300, 600), ("concurrency", 1, 2),
        ]  # fmt: skip
        assert [use.free_s for use in found] == [6, 30, None]


async def test_reading_charges_nothing(limiter: Limiter) -> None:
    for _ in range(50):
        await limiter.uses(request())
    assert await used(limiter) == {"requests": 0, "tokens": 0, "concurrency": 0}
    with await limiter.decide(request()), await limiter.decide(request()):
        assert (await used(limiter))["concurrency"] == 2


async def test_limits_of_the_owner_are_read_too(limiter: Limiter) -> None:
    owner = Owner("research", LimitSettings(requests_per_minute=5))
    with await limiter.decide(request(owner=owner)):
        found = await uses(limiter, request(owner=owner))
    assert ("owner", "research", "requests", 5, 1) in [
        (use.subject, use.name, use.kind, use.most, use.used) for use in found
    ]


async def test_a_limit_of_0_allows_nothing(limiter: Limiter) -> None:
    none = LimitSettings(requests_per_minute=0, tokens_per_minute=0, concurrent_requests=0)
    found = await uses(limiter, LimitRequest("key-1", none, "", NO_LIMITS, 0))
    assert [(use.used, use.most) for use in found] == [(0, 0)] * 3


async def test_no_limits_have_no_use(limiter: Limiter) -> None:
    assert await limiter.uses(LimitRequest("key-1", NO_LIMITS, "", NO_LIMITS, 0)) == []


@pytest.mark.parametrize(("policy", "known"), [("closed", False), ("open", False), ("local", True)])
async def test_use_while_redis_is_unavailable(policy: str, known: bool) -> None:
    nothing = f"redis://127.0.0.1:{free_port()}"
    async with limiter_on(nothing, policy=policy) as limiter:
        assert (await limiter.uses(request()) is not None) is known
