"""Rate limits of reads, which are counted separately from requests."""

from app.limits.limiter import ReadLimiter
from app.settings import NO_LIMITS, LimitSettings

TWO = LimitSettings(requests_per_minute=2, tokens_per_minute=0, concurrent_requests=0)


def test_reads_are_limited_like_requests() -> None:
    now = 0.0
    bounds = ReadLimiter(lambda: now)
    assert [bounds.refusal("a", TWO) is None for _ in range(3)] == [True, True, False]
    assert bounds.refusal("b", TWO) is None, "another key has its own reads"
    now = 30.0
    assert [bounds.refusal("a", TWO) is None for _ in range(2)] == [True, False]


def test_refusal_has_retry_after() -> None:
    bounds = ReadLimiter(lambda: 0.0)
    bounds.refusal("a", LimitSettings(requests_per_minute=1))
    refusal = bounds.refusal("a", LimitSettings(requests_per_minute=1))
    assert refusal is not None
    assert (refusal.limit, refusal.retry_after_s) == ("requests", 60)


def test_without_a_limit_of_requests_reads_have_none() -> None:
    bounds = ReadLimiter(lambda: 0.0)
    assert all(bounds.refusal("a", NO_LIMITS) is None for _ in range(1000))
