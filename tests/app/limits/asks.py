"""Requests for the tests of limits."""

from app.auth import Owner
from app.limits.terms import LimitRequest
from app.settings import LimitSettings

NONE = LimitSettings()


def limits(
    requests: int | None = None, tokens: int | None = None, concurrent: int | None = None
) -> LimitSettings:
    return LimitSettings(
        requests_per_minute=requests, tokens_per_minute=tokens, concurrent_requests=concurrent
    )


def ask(
    key: LimitSettings = NONE,
    model: LimitSettings = NONE,
    *,
    tokens: int = 10,
    key_id: str = "k",
    model_name: str = "demo",
    concurrent: bool = True,
    precharged: bool = False,
    owner: Owner | None = None,
) -> LimitRequest:
    return LimitRequest(key_id, key, model_name, model, tokens, concurrent, precharged, owner)


def owned(
    requests: int | None = None,
    tokens: int | None = None,
    concurrent: int | None = None,
    *,
    name: str = "research",
) -> Owner:
    return Owner(name, limits(requests, tokens, concurrent))
