"""Limits counted in memory: all or nothing, given back, forgotten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.auth import Owner
from app.limits.memory_store import MemoryStore
from app.limits.terms import Terms, terms_of
from app.settings import LimitSettings
from tests.app.limits.asks import NONE, ask, limits, owned

BURST_S = 60.0


def passes(store: MemoryStore, terms: Terms, now: float = 0.0) -> bool:
    return store.decide(terms, now).admitted


def test_key_uses_its_requests_then_waits_for_a_refill() -> None:
    store, terms = MemoryStore(BURST_S), terms_of(ask(limits(requests=3)))
    assert [passes(store, terms) for _ in range(4)] == [True, True, True, False]
    assert not passes(store, terms, 19.9)
    assert passes(store, terms, 20.0)


def test_unused_part_of_reserved_tokens_is_refunded() -> None:
    store, terms = MemoryStore(BURST_S), terms_of(ask(limits(tokens=100), tokens=60))
    assert passes(store, terms)
    assert not passes(store, terms)
    store.release(terms, 40, 0.0)
    assert passes(store, terms)


def test_tokens_beyond_what_was_reserved_are_owed() -> None:
    store, terms = MemoryStore(BURST_S), terms_of(ask(limits(tokens=60), tokens=10))
    assert passes(store, terms)
    store.release(terms, 120, 0.0)
    assert store.decide(terms, 0.0).debts == [120.0]
    assert not passes(store, terms, 69.9)
    assert passes(store, terms, 70.0)


def test_a_slot_is_taken_until_it_is_released() -> None:
    store, terms = MemoryStore(BURST_S), terms_of(ask(limits(concurrent=2)))
    assert [store.decide(terms, 0.0).busy for _ in range(2)] == [[1], [2]]
    assert not passes(store, terms, 1e9)
    store.release(terms, 0, 0.0)
    assert passes(store, terms)


def test_request_without_a_slot_passes_while_all_are_in_use() -> None:
    store = MemoryStore(BURST_S)
    assert passes(store, terms_of(ask(limits(concurrent=1))))
    assert passes(store, terms_of(ask(limits(concurrent=1), concurrent=False)))


def test_model_limit_is_shared_and_key_limits_are_separate() -> None:
    store = MemoryStore(BURST_S)
    model = limits(requests=3)
    one = terms_of(ask(limits(requests=2), model, key_id="one"))
    two = terms_of(ask(limits(requests=2), model, key_id="two"))
    assert [passes(store, one) for _ in range(3)] == [True, True, False]
    assert [passes(store, two) for _ in range(2)] == [True, False]


def test_key_or_owner_named_like_a_model_is_counted_separately() -> None:
    store = MemoryStore(BURST_S)
    assert passes(store, terms_of(ask(limits(1, 10, 1), key_id="same")))
    assert passes(store, terms_of(ask(owner=owned(1, 10, 1, name="same"))))
    assert passes(store, terms_of(ask(NONE, limits(1, 10, 1), model_name="same")))


every_limit = st.builds(
    limits,
    st.none() | st.integers(0, 5),
    st.none() | st.integers(0, 100),
    st.none() | st.integers(0, 3),
)

every_owner = st.none() | st.builds(Owner, st.just("research"), every_limit)


@given(
    every_limit,
    every_limit,
    every_owner,
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 60), st.booleans()), max_size=30),
)
def test_refusal_changes_no_counters(
    key: LimitSettings,
    model: LimitSettings,
    owner: Owner | None,
    steps: list[tuple[float, int, bool]],
) -> None:
    """A store that never heard of the refused requests decides the others alike."""
    store, unaware, now = MemoryStore(BURST_S), MemoryStore(BURST_S), 0.0
    for step_s, tokens, concurrent in steps:
        now += step_s
        terms = terms_of(ask(key, model, tokens=tokens, concurrent=concurrent, owner=owner))
        reading = store.decide(terms, now)
        if reading.admitted:
            assert unaware.decide(terms, now) == reading


@given(every_limit, every_limit, every_owner, st.integers(0, 60))
def test_request_without_used_tokens_is_charged_as_a_request_only(
    key: LimitSettings, model: LimitSettings, owner: Owner | None, tokens: int
) -> None:
    store, fresh = MemoryStore(BURST_S), MemoryStore(BURST_S)
    terms = terms_of(ask(key, model, tokens=tokens, owner=owner))
    if passes(store, terms):
        store.release(terms, 0, 0.0)
        assert passes(fresh, terms_of(ask(key, model, tokens=0, concurrent=False, owner=owner)))
    assert store.decide(terms, 0.0) == fresh.decide(terms, 0.0)


@pytest.mark.slow
def test_idle_keys_are_evicted() -> None:
    store = MemoryStore(BURST_S)
    for number in range(20_000):
        terms = terms_of(ask(limits(60, 600, 1), key_id=str(number)))
        assert passes(store, terms)
        store.release(terms, 10, 0.0)
    assert len(store) == 40_000
    last = terms_of(ask(limits(requests=10**9), key_id="last"))
    for _ in range(20_001):
        assert passes(store, last, 61.0)
    assert len(store) == 1


def test_refilled_buckets_are_evicted_as_fast_as_new_ones_arrive() -> None:
    store = MemoryStore(BURST_S)
    most = 0
    for number in range(20_000):
        terms = terms_of(ask(limits(requests=600), key_id=str(number)))
        assert passes(store, terms, number * 0.001)  # full again after 0.1 s
        most = max(most, len(store))
    assert most < 1_000
