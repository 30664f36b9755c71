"""What one request asks of the limits of its key and of its model."""

from math import inf
from typing import Literal

import msgspec

from app.limits.bucket import seconds
from app.settings import LimitSettings

Subject = Literal["key", "model"]
Kind = Literal["requests", "tokens"]

# No engine takes a longer request; a client may well name a larger number.
MOST_TOKENS = 10**12
# More keys and models than are busy at a time; beyond it all are made anew.
MOST_SCOPES = 4096


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What one request wants, of two subjects."""

    key_id: str
    key: LimitSettings
    model: str
    model_limits: LimitSettings  # for all keys together
    tokens: int  # reserved: the estimate of the prompt and the bound of the answer
    concurrent: bool = True  # False: it takes no slot
    # The key's request and slot were taken before the body was read; they are not taken again.
    entered: bool = False


class BucketTerm(msgspec.Struct, frozen=True, gc=False):
    """One bucket that a request draws from."""

    place: str  # names the bucket in a store; no two buckets share one
    subject: Subject
    name: str
    kind: Kind
    limit: int


class SlotTerm(msgspec.Struct, frozen=True, gc=False):
    """One count of requests under way that a request adds to."""

    place: str
    subject: Subject
    name: str
    limit: int


class Scope(msgspec.Struct, frozen=True, gc=False):
    """Every limit that a key meets at a model, the same from request to request."""

    key: LimitSettings
    model: LimitSettings
    buckets: tuple[BucketTerm, ...]
    slots: tuple[SlotTerm, ...]


class Terms(msgspec.Struct, frozen=True, gc=False):
    """Every limit that a request meets, and what it takes of them."""

    buckets: tuple[BucketTerm, ...]
    slots: tuple[SlotTerm, ...]
    costs: list[float]  # of each bucket, in seconds of refill
    tokens: int


class Reading(msgspec.Struct, frozen=True, gc=False):
    """A store's answer: what is owed and under way after it, in the order of the terms."""

    admitted: bool
    debts: list[float]
    busy: list[int]


class Scopes:
    """The scopes that were met of late, so that a request need not make its own.

    `burst_s` bounds what one request may reserve of a bucket that all keys share: a large request
    empties the bucket, and never keeps the other keys out for longer than it takes to refill.
    """

    def __init__(self, burst_s: float, most: int = MOST_SCOPES) -> None:
        self._burst_s = burst_s
        self._most = most
        self._known: dict[tuple[str, str, bool, bool], Scope] = {}

    def __len__(self) -> int:
        return len(self._known)

    def terms(self, ask: Ask) -> Terms:
        """Return what terms_of returns."""
        at = (ask.key_id, ask.model, ask.concurrent, ask.entered)
        scope = self._known.get(at)
        # Settings are frozen: limits that have changed are another object.
        if scope is None or scope.key is not ask.key or scope.model is not ask.model_limits:
            if len(self._known) >= self._most:
                self._known.clear()
            scope = self._known[at] = scope_of(ask)
        return _terms(scope, ask, self._burst_s)


def terms_of(ask: Ask, burst_s: float = inf) -> Terms:
    """Return the limits that a request meets; none at all where nothing is limited."""
    return _terms(scope_of(ask), ask, burst_s)


def scope_of(ask: Ask) -> Scope:
    """Return the limits that requests meet which differ from this one in their tokens alone."""
    buckets: list[BucketTerm] = []
    slots: list[SlotTerm] = []
    _add("key", ask.key_id, ask.key, ask, buckets, slots)
    _add("model", ask.model, ask.model_limits, ask, buckets, slots)
    return Scope(ask.key, ask.model_limits, tuple(buckets), tuple(slots))


def _add(
    subject: Subject,
    name: str,
    limits: LimitSettings,
    ask: Ask,
    buckets: list[BucketTerm],
    slots: list[SlotTerm],
) -> None:
    # The name comes last: whatever stands in it, it cannot look like another place.
    limit = limits.requests_per_minute
    if limit is not None:
        place = f"{subject}:requests:{name}"
        buckets.append(BucketTerm(place, subject, name, "requests", limit))
    limit = limits.tokens_per_minute
    if limit is not None:
        place = f"{subject}:tokens:{name}"
        buckets.append(BucketTerm(place, subject, name, "tokens", limit))
    limit = limits.concurrent_requests
    if limit is not None and ask.concurrent and not (ask.entered and subject == "key"):
        slots.append(SlotTerm(f"{subject}:slots:{name}", subject, name, limit))


def _terms(scope: Scope, ask: Ask, burst_s: float) -> Terms:
    tokens = ask.tokens if ask.tokens < MOST_TOKENS else MOST_TOKENS
    costs: list[float] = []
    for term in scope.buckets:
        if term.kind == "requests":
            taken = ask.entered and term.subject == "key"
            costs.append(0.0 if taken else seconds(1, term.limit))
        else:
            cost_s = seconds(tokens, term.limit)
            shared = term.subject == "model" and burst_s < cost_s < inf
            costs.append(burst_s if shared else cost_s)
    return Terms(scope.buckets, scope.slots, costs, tokens)


def settlement(terms: Terms, tokens: float) -> list[float]:
    """Return what each bucket still has to be charged, in seconds, once `tokens` were used."""
    return [
        seconds(tokens, term.limit) - cost_s if term.kind == "tokens" and term.limit else 0.0
        for term, cost_s in zip(terms.buckets, terms.costs, strict=True)
    ]


def undoing(terms: Terms) -> list[float]:
    """Return what takes every charge back."""
    return [-cost_s for cost_s in terms.costs]
