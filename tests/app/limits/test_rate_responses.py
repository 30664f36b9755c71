"""Rate limit headers as OpenAI sends them, and refusal messages."""

import re
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.auth import Owner
from app.limits import bucket
from app.limits.memory_store import MemoryStore
from app.limits.rate_responses import duration, header_lines, headers, refusal
from app.limits.terms import LimitRequest, terms_of
from app.settings import LimitSettings
from tests.app.limits.asks import ask, limits, owned

BURST_S = 60.0
THE_OWNER = "the owner of this key"


def headers_of(
    request: LimitRequest, *, times: int = 1, burst_s: float = BURST_S
) -> dict[str, str]:
    """Return the x-ratelimit-* headers of the last of several requests, without the prefix."""
    store, terms = MemoryStore(burst_s), terms_of(request)
    for _ in range(times):
        reading = store.decide(terms, 0.0)
    return {
        name.decode().removeprefix("x-ratelimit-"): value.decode()
        for name, value in headers(terms, reading, burst_s)
    }


def why(request: LimitRequest, *, times: int = 1) -> tuple[str, str, int | None]:
    """Return limit, message and Retry-After of the refusal of the last of several requests."""
    store, terms = MemoryStore(BURST_S), terms_of(request)
    for _ in range(times):
        reading = store.decide(terms, 0.0)
    error = refusal(terms, reading, BURST_S)
    assert error is not None
    return error.limit, error.message, error.retry_after_s


# Headers


def test_headers_contain_limit_remaining_and_reset() -> None:
    assert headers_of(ask(limits(600, 1000), tokens=100)) == {
        "limit-requests": "600",
        "remaining-requests": "599",
        "reset-requests": "100ms",
        "limit-tokens": "1000",
        "remaining-tokens": "900",
        "reset-tokens": "6s",
    }


def test_no_limit_means_no_header() -> None:
    assert headers_of(ask(limits(concurrent=1))) == {}
    assert set(headers_of(ask(limits(tokens=10)))) == {
        "limit-tokens",
        "remaining-tokens",
        "reset-tokens",
    }


def test_refusal_has_rate_limit_headers() -> None:
    assert headers_of(ask(limits(requests=2)), times=3) == {
        "limit-requests": "2",
        "remaining-requests": "0",
        "reset-requests": "1m0s",
    }


@pytest.mark.parametrize(
    ("key", "model"), [(limits(100, 50), limits(10, 500)), (limits(10, 500), limits(100, 50))]
)
def test_the_tighter_of_key_and_model_counts_for_each_kind(
    key: LimitSettings, model: LimitSettings
) -> None:
    shown = headers_of(ask(key, model, tokens=5))
    assert (shown["limit-requests"], shown["remaining-requests"]) == ("10", "9")
    assert (shown["limit-tokens"], shown["remaining-tokens"]) == ("50", "45")


def test_the_owners_limit_counts_where_it_is_the_tightest() -> None:
    shown = headers_of(ask(limits(100, 500), limits(90), owner=owned(20, 5000), tokens=5))
    assert (shown["limit-requests"], shown["remaining-requests"]) == ("20", "19")
    assert (shown["limit-tokens"], shown["remaining-tokens"]) == ("500", "495")


def test_a_shorter_burst_leaves_less_than_the_limit_of_a_minute() -> None:
    shown = headers_of(ask(limits(requests=600)), burst_s=10)
    assert (shown["limit-requests"], shown["remaining-requests"]) == ("600", "99")


def test_zero_limit_has_zero_remaining() -> None:
    assert headers_of(ask(limits(requests=0))) == {
        "limit-requests": "0",
        "remaining-requests": "0",
        "reset-requests": "0s",
    }


every_limit = st.builds(
    limits, st.none() | st.integers(0, 10**9), st.none() | st.integers(0, 10**9)
)


@given(
    every_limit,
    st.none() | every_limit,
    every_limit,
    st.integers(0, 10**6),
    st.lists(st.floats(0, 30), max_size=9),
)
def test_header_lines_are_the_headers_of_a_response(
    key: LimitSettings,
    owner: LimitSettings | None,
    model: LimitSettings,
    tokens: int,
    steps: list[float],
) -> None:
    team = None if owner is None else Owner("research", owner)
    store, terms = MemoryStore(BURST_S), terms_of(ask(key, model, tokens=tokens, owner=team))
    for now in accumulate(steps):
        reading = store.decide(terms, now)
        assert header_lines(terms, reading, BURST_S) == b"".join(
            b"%b: %b\r\n" % header for header in headers(terms, reading, BURST_S)
        )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.0001, "1ms"), (0.12, "120ms"), (0.9999, "1s"), (1, "1s"), (1.5, "1.5s"),
        (59.9999, "1m0s"), (60, "1m0s"), (83.456, "1m23.456s"), (360, "6m0s"), (3600, "1h0m0s"),
        (90061.25, "25h1m1.25s"),
    ],
)  # fmt: skip
def test_durations_are_written_as_go_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e6))
def test_a_duration_read_back_is_long_enough_and_not_a_millisecond_too_long(seconds: float) -> None:
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)(m?s))", duration(seconds))
    assert match is not None
    hours, minutes, rest, unit = match.groups()
    read = int(hours or 0) * 3600 + int(minutes or 0) * 60
    value = read + float(rest) / (1000 if unit == "ms" else 1)
    assert seconds - 2 * bucket.EPSILON_S <= value < seconds + 0.001 + 2 * bucket.EPSILON_S


# Refusals


def test_admitted_request_has_no_refusal() -> None:
    terms = terms_of(ask(limits(1, 10, 1)))
    assert refusal(terms, MemoryStore(BURST_S).decide(terms, 0.0), BURST_S) is None


def test_refusal_names_limit_value_and_retry_time() -> None:
    assert why(ask(limits(requests=3)), times=4) == (
        "requests",
        "this key may make 3 requests per minute; try again in 20 s",
        20,
    )
    assert why(ask(limits(tokens=100), tokens=60), times=2) == (
        "tokens",
        "this key may use 100 tokens per minute, and this request may take up to 60 tokens; "
        "try again in 12 s",
        12,
    )
    assert why(ask(limits(concurrent=1)), times=2) == (
        "concurrency",
        "this key may have at most 1 concurrent request; try again when one completes",
        1,
    )


def test_a_refusal_by_the_model_names_it() -> None:
    assert why(ask(model=limits(requests=1)), times=2) == (
        "requests",
        "the model demo takes 1 request per minute from all keys together; try again in 60 s",
        60,
    )
    assert why(ask(model=limits(tokens=10)), times=2)[1].startswith(
        "the model demo takes 10 tokens per minute from all keys together, and this request"
    )
    assert why(ask(model=limits(concurrent=2)), times=3)[1] == (
        "the model demo takes at most 2 concurrent requests from all keys together; "
        "try again when one completes"
    )


def test_refusal_by_the_owner_names_neither_owner_nor_keys() -> None:
    assert why(ask(limits(100), owner=owned(requests=3)), times=4) == (
        "requests",
        "the owner of this key may make 3 requests per minute with all its keys together; "
        "try again in 20 s",
        20,
    )
    assert why(ask(owner=owned(tokens=100), tokens=60), times=2)[1] == (
        "the owner of this key may use 100 tokens per minute with all its keys together, and this "
        "request may take up to 60 tokens; try again in 12 s"
    )
    assert why(ask(owner=owned(concurrent=1)), times=2) == (
        "concurrency",
        "the owner of this key may have at most 1 concurrent request with all its keys together; "
        "try again when one completes",
        1,
    )


@pytest.mark.parametrize(
    ("limited", "limit", "message"),
    [
        (ask(owner=owned(0)), "requests", f"{THE_OWNER} may make no requests: its limit is 0"),
        (ask(owner=owned(tokens=0)), "tokens", f"{THE_OWNER} may use no tokens: its limit is 0"),
        (ask(limits(requests=0)), "requests", "this key may make no requests: its limit is 0"),
        (ask(limits(tokens=0)), "tokens", "this key may use no tokens: its limit is 0"),
        (ask(limits(concurrent=0)), "concurrency", "this key may make no requests: its limit is 0"),
        (ask(model=limits(0)), "requests", "the model demo takes no requests: its limit is 0"),
        (ask(model=limits(tokens=0)), "tokens", "the model demo takes no tokens: its limit is 0"),
    ],
)  # fmt: skip
def test_refusal_by_a_zero_limit_has_no_retry_after(
    limited: LimitRequest, limit: str, message: str
) -> None:
    assert why(limited) == (limit, message, None)


def test_refusal_by_several_limits_names_the_longest_wait() -> None:
    assert why(ask(limits(6, 1, 1)), times=2)[::2] == ("tokens", 600)
    assert why(ask(limits(1, None, 1)), times=2)[::2] == ("requests", 60)
    assert why(ask(limits(1, 1, 0)), times=2)[::2] == ("concurrency", None)


@given(
    st.integers(1, 50),
    st.integers(1, 50),
    st.integers(1, 2000),
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 3000)), max_size=30),
)
def test_request_after_retry_after_passes(
    requests: int, model_requests: int, tokens: int, steps: list[tuple[float, int]]
) -> None:
    store, now = MemoryStore(BURST_S), 1000.0
    for step_s, amount in steps:
        now += step_s
        terms = terms_of(
            ask(limits(requests, tokens), limits(model_requests, 2 * tokens), tokens=amount)
        )
        error = refusal(terms, store.decide(terms, now), BURST_S)
        if error is not None:
            assert error.retry_after_s is not None
            assert error.retry_after_s >= 1
            now += error.retry_after_s
            assert store.decide(terms, now).admitted


def test_a_retry_is_a_whole_number_that_is_not_a_second_too_long() -> None:
    assert why(ask(limits(requests=7)), times=8)[2] == 9  # 60 / 7 is 8.57
