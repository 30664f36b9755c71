"""The limits that a request meets, and what it is charged."""

from app.limits.terms import settlement, terms_of
from tests.app.limits.asks import ask, limits, owned


def test_charge_made_before_the_body_is_not_repeated() -> None:
    request = ask(
        limits(10, 100, 5), limits(20, 200, 6), tokens=50, precharged=True, owner=owned(30, 300, 7)
    )
    terms = terms_of(request)
    assert [(t.subject, t.kind) for t in terms.scope.buckets] == [
        ("key", "requests"), ("key", "tokens"), ("owner", "requests"), ("owner", "tokens"),
        ("model", "requests"), ("model", "tokens"),
    ]  # fmt: skip
    assert list(terms.costs.values()) == [0.0, 30.0, 0.0, 10.0, 3.0, 15.0]
    assert [slot.subject for slot in terms.scope.slots] == ["model"]


def test_a_request_reserves_no_more_of_a_shared_bucket_than_it_holds() -> None:
    request = ask(
        limits(tokens=1000), limits(tokens=1000), tokens=1_000_000, owner=owned(tokens=1000)
    )
    terms = terms_of(request, 60.0)
    # Its own bucket is its own business.
    assert list(terms.costs.values()) == [60_000.0, 60.0, 60.0]
    assert settlement(terms, 500) == [30.0 - 60_000.0, 30.0 - 60.0, 30.0 - 60.0]
    # What it really takes is owed all the same.
    assert settlement(terms, 3000)[1:] == [120.0, 120.0]
