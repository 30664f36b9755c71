"""Cached terms of a request equal newly built ones."""

from hypothesis import given
from hypothesis import strategies as st

from app.auth import Owner
from app.limits.terms import Scopes, settlement, terms_of
from app.settings import LimitSettings
from tests.app.limits.asks import NONE, ask, limits, owned

every_limit = st.just(NONE) | st.builds(
    limits,
    st.none() | st.integers(0, 10**9),
    st.none() | st.integers(0, 10**9),
    st.none() | st.integers(0, 10**9),
)


@given(
    st.lists(every_limit, min_size=4, max_size=4),
    st.lists(st.none() | st.builds(Owner, st.sampled_from("ab"), every_limit), min_size=2),
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 1),
            st.integers(0, 3),
            st.sampled_from("ab"),
            st.sampled_from("ab"),
            st.integers(0, 10**13),
            st.booleans(),
            st.booleans(),
        ),
        max_size=30,
    ),
)
def test_terms_of_cached_scopes_match_the_request(
    every: list[LimitSettings],
    owners: list[Owner | None],
    steps: list[tuple[int, int, int, str, str, int, bool, bool]],
) -> None:
    """Keys, owners and models share names, and their limits change from request to request."""
    scopes = Scopes(60.0)
    for key, owner, model, key_id, model_name, tokens, concurrent, precharged in steps:
        request = ask(
            every[key],
            every[model],
            tokens=tokens,
            key_id=key_id,
            model_name=model_name,
            concurrent=concurrent,
            precharged=precharged,
            owner=owners[owner],
        )
        assert scopes.terms(request) == terms_of(request, 60.0)


def test_scope_is_cached_until_a_limit_changes() -> None:
    scopes, key, model = Scopes(60.0), limits(10, 1000, 5), limits(20)
    first = scopes.terms(ask(key, model, tokens=1))
    assert scopes.terms(ask(key, model, tokens=2)).buckets is first.buckets
    assert scopes.terms(ask(limits(11), model)).buckets[0].limit == 11
    assert scopes.terms(ask(key, limits(21))).buckets[-1].limit == 21
    assert scopes.terms(ask(key, model, owner=owned(22))).buckets[2].limit == 22
    assert len(scopes.terms(ask(key, model)).buckets) == 3
    assert len(scopes) == 1


def test_scope_cache_is_bounded() -> None:
    scopes = Scopes(60.0, max_size=10)
    for number in range(100):
        request = ask(limits(requests=number), key_id=str(number))
        assert scopes.terms(request) == terms_of(request, 60.0)
        assert len(scopes) <= 10


def test_charge_made_before_the_body_is_not_repeated() -> None:
    request = ask(
        limits(10, 100, 5), limits(20, 200, 6), tokens=50, precharged=True, owner=owned(30, 300, 7)
    )
    terms = terms_of(request)
    assert [(t.subject, t.kind) for t in terms.buckets] == [
        ("key", "requests"), ("key", "tokens"), ("owner", "requests"), ("owner", "tokens"),
        ("model", "requests"), ("model", "tokens"),
    ]  # fmt: skip
    assert list(terms.costs.values()) == [0.0, 30.0, 0.0, 10.0, 3.0, 15.0]
    assert [slot.subject for slot in terms.slots] == ["model"]


def test_a_request_reserves_no_more_of_a_shared_bucket_than_it_holds() -> None:
    request = ask(
        limits(tokens=1000), limits(tokens=1000), tokens=1_000_000, owner=owned(tokens=1000)
    )
    terms = Scopes(60.0).terms(request)
    # Its own bucket is its own business.
    assert list(terms.costs.values()) == [60_000.0, 60.0, 60.0]
    assert settlement(terms, 500) == [30.0 - 60_000.0, 30.0 - 60.0, 30.0 - 60.0]
    # What it really takes is owed all the same.
    assert settlement(terms, 3000)[1:] == [120.0, 120.0]
