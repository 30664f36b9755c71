"""The prompt tokens in flight at an engine, and the rate at which it computes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.prefill import (
    FORGET_S,
    INITIAL_RATE,
    MAX_RATE,
    MIN_RATE,
    MIN_SAMPLE_TOKENS,
    PrefillLoad,
)


def learn(
    load: PrefillLoad, tokens: int, seconds: float, *, since: float = 0.0, times: int = 1
) -> float:
    """Compute one prompt after the other; return the time of the last first token."""
    now = since
    for _ in range(times):
        prefill = load.begin(now, tokens, observed=True)
        now += seconds
        prefill.first_token(now)
    return now


def test_wait_is_that_for_the_tokens_in_flight_and_the_prompt_itself() -> None:
    load = PrefillLoad()
    load.begin(0.0, 3 * int(INITIAL_RATE), observed=True)
    assert load.wait_s(0.0, int(INITIAL_RATE)) == pytest.approx(4.0)


def test_first_token_ends_a_prompt() -> None:
    load = PrefillLoad()
    prefill = load.begin(0.0, 1000, observed=True)
    prefill.first_token(0.5)
    prefill.end()  # at the end of the request
    assert load.tokens == 0


def test_end_of_a_request_without_a_token_ends_its_prompt_and_teaches_nothing() -> None:
    load = PrefillLoad()
    prefill = load.begin(0.0, 1000, observed=True)
    prefill.end()
    assert (load.tokens, load.rate) == (0, INITIAL_RATE)


def test_plain_response_counts_until_its_prompt_should_be_computed() -> None:
    load = PrefillLoad()
    prefill = load.begin(0.0, 2 * int(INITIAL_RATE), observed=False)
    assert load.wait_s(1.9, 0) == pytest.approx(2.0)
    assert load.wait_s(2.0, 0) == 0.0
    prefill.first_token(60.0)
    prefill.end()
    assert (load.tokens, load.rate) == (0, INITIAL_RATE)


def test_rate_is_learned_from_first_tokens() -> None:
    load = PrefillLoad()
    now = learn(load, 2000, 4.0, times=3)
    assert load.rate == pytest.approx(500.0)
    learn(load, 2000, 0.5, since=now, times=60)
    assert load.rate == pytest.approx(4000.0, rel=0.05)


def test_time_that_a_prompt_waited_for_others_is_not_its_own() -> None:
    load = PrefillLoad()
    prefills = [load.begin(0.0, 1000, observed=True) for _ in range(10)]
    for number, prefill in enumerate(prefills):
        prefill.first_token(number + 1.0)
    assert load.rate == pytest.approx(1000.0)


def test_prompts_that_are_computed_in_one_step_share_its_time() -> None:
    load = PrefillLoad()
    for prefill in [load.begin(0.0, 1000, observed=True) for _ in range(5)]:
        prefill.first_token(1.0)
    assert load.rate == pytest.approx(5000.0, rel=0.25)


def test_cached_prompts_do_not_slow_the_rate() -> None:
    load = PrefillLoad()
    learn(load, MIN_SAMPLE_TOKENS - 1, 0.05, times=100)
    assert load.rate == INITIAL_RATE


def test_rate_of_a_slow_moment_is_forgotten_while_no_prompt_tells_another() -> None:
    load = PrefillLoad()
    now = learn(load, 1000, 100.0)
    assert load.wait_s(now + FORGET_S, 1000) == pytest.approx(100.0)
    assert load.wait_s(now + FORGET_S + 1, int(INITIAL_RATE)) == pytest.approx(1.0)


def test_what_other_gateways_send_slows_ours() -> None:
    """They send as much as this one: half of what the engine computes is ours."""
    load = PrefillLoad()
    learn(load, 1000, 1000 / 4000 + 1000 / 4000, times=20)
    assert load.rate == pytest.approx(2000)


@given(
    st.lists(
        st.tuples(st.integers(0, 2**20), st.floats(-1e3, 1e6), st.booleans(), st.integers(0, 3)),
        max_size=40,
    )
)
def test_nothing_is_left_when_all_have_ended(
    prompts: list[tuple[int, float, bool, int]],
) -> None:
    """Whatever the clock does: tokens are never negative, and the rate stays within its bounds."""
    load = PrefillLoad()
    begun = []
    for tokens, now, observed, ends in prompts:
        begun.append(load.begin(now, tokens, observed=observed))
        for prefill in begun[-ends:] if ends else ():
            prefill.first_token(now)
        assert load.tokens >= 0
        assert load.wait_s(now, tokens) >= 0
        assert MIN_RATE <= load.rate <= MAX_RATE
    for prefill in begun:
        prefill.end()
    assert load.tokens == 0
    load.wait_s(0.0, 0)
    assert not load._unobserved
