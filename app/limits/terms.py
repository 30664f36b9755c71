"""What one request asks of the limits of its key, of the key's owner, and of its model."""

from math import inf
from typing import Literal, Protocol

import msgspec

from app.limits.bucket import seconds
from app.settings import NO_LIMITS, LimitSettings

Subject = Literal["key", "owner", "model"]
Kind = Literal["requests", "tokens"]

HEADER_NAMES: dict[Kind, tuple[bytes, bytes, bytes]] = {
    "requests": (
        b"x-ratelimit-limit-requests",
        b"x-ratelimit-remaining-requests",
        b"x-ratelimit-reset-requests",
    ),
    "tokens": (
        b"x-ratelimit-limit-tokens",
        b"x-ratelimit-remaining-tokens",
        b"x-ratelimit-reset-tokens",
    ),
}
_LINES: dict[Kind, bytes] = {
    kind: b"%b: %%d\r\n%b: %%b\r\n%b: %%b\r\n" % names for kind, names in HEADER_NAMES.items()
}
# No engine takes a longer request; a client may well name a larger number.
MOST_TOKENS = 10**12
# More keys and models than are busy at a time; beyond it all are made anew.
MOST_SCOPES = 4096


class Owner(Protocol):
    """The owner of a key, whose limits are for all its keys together."""

    @property
    def name(self) -> str: ...
    @property
    def limits(self) -> LimitSettings: ...


class LimitRequest(msgspec.Struct, frozen=True, gc=False):
    """What one request wants, of up to three subjects."""

    key_id: str
    key: LimitSettings
    model: str
    model_limits: LimitSettings  # for all keys together
    tokens: int  # reserved: the estimate of the prompt and the bound of the answer
    concurrent: bool = True  # False: it takes no slot
    # The request and slot of key and owner were taken before the body was read; they are not taken
    # again.
    entered: bool = False
    owner: Owner | None = None  # None: the key's owner has no limits


class BucketTerm(msgspec.Struct, frozen=True, gc=False):
    """One bucket that a request draws from."""

    place: str  # names the bucket in a store; no two buckets share one
    subject: Subject
    name: str
    kind: Kind
    limit: int
    request_s: float  # what one request costs, in seconds of refill; 0: none is counted


class SlotTerm(msgspec.Struct, frozen=True, gc=False):
    """One count of requests under way that a request adds to."""

    place: str
    subject: Subject
    name: str
    limit: int


class Scope(msgspec.Struct, frozen=True, gc=False):
    """Every limit that a key meets at a model, the same from request to request."""

    key: LimitSettings
    owner: Owner | None
    model: LimitSettings
    buckets: tuple[BucketTerm, ...]
    slots: tuple[SlotTerm, ...]
    costs: dict[str, float]  # by place, in the order of the buckets; those of tokens are 0 here
    metered: tuple[tuple[str, int, float], ...]  # place, limit and highest cost of tokens' buckets
    # The lines of the rate headers without their numbers, where one bucket limits each kind.
    header_lines: bytes | None


class Terms(msgspec.Struct, frozen=True, gc=False):
    """Every limit that a request meets, and what it takes of them."""

    scope: Scope
    costs: dict[str, float]  # by place, in the order of the buckets, in seconds of refill
    tokens: int

    @property
    def buckets(self) -> tuple[BucketTerm, ...]:
        return self.scope.buckets

    @property
    def slots(self) -> tuple[SlotTerm, ...]:
        return self.scope.slots


class Reading(msgspec.Struct, frozen=True, gc=False):
    """A store's answer: what is owed and under way after it, in the order of the terms."""

    admitted: bool
    debts: list[float]
    busy: list[int]


NO_TERMS = Terms(Scope(NO_LIMITS, None, NO_LIMITS, (), (), {}, (), None), {}, 0)
NOTHING_TAKEN = Reading(True, [], [])


class Scopes:
    """The scopes that were met of late, so that a request need not make its own.

    `burst_s` bounds what one request may reserve of a bucket that several keys share, an owner's or
    a model's: a large request empties the bucket, and never keeps the other keys out for longer
    than it takes to refill.
    """

    def __init__(self, burst_s: float, most: int = MOST_SCOPES) -> None:
        self._burst_s = burst_s
        self._most = most
        self._known: dict[tuple[str, str, bool, bool], Scope] = {}

    def __len__(self) -> int:
        return len(self._known)

    def terms(self, ask: LimitRequest) -> Terms:
        """Return the limits that a request meets; none at all where nothing is limited."""
        at = ask.key_id, ask.model, ask.concurrent, ask.entered
        scope = self._known.get(at)
        # Settings are frozen: limits that have changed are another object.
        if (
            scope is None
            or scope.key is not ask.key
            or scope.owner is not ask.owner
            or scope.model is not ask.model_limits
        ):
            if len(self._known) >= self._most:
                self._known.clear()
            scope = self._known[at] = scope_of(ask, self._burst_s)
        tokens = ask.tokens if ask.tokens < MOST_TOKENS else MOST_TOKENS
        costs = scope.costs.copy()
        for place, limit, highest_s in scope.metered:
            cost_s = tokens * 60.0 / limit if limit else seconds(tokens, 0)
            costs[place] = cost_s if cost_s < highest_s else highest_s
        return Terms(scope, costs, tokens)


def terms_of(ask: LimitRequest, burst_s: float = inf) -> Terms:
    """Return what a request takes of limits that were not met before."""
    return Scopes(burst_s).terms(ask)


def scope_of(ask: LimitRequest, burst_s: float) -> Scope:
    """Return the limits of all requests that differ from this one in their tokens alone."""
    buckets: list[BucketTerm] = []
    slots: list[SlotTerm] = []
    _add("key", ask.key_id, ask.key, ask, buckets, slots)
    if ask.owner is not None:
        _add("owner", ask.owner.name, ask.owner.limits, ask, buckets, slots)
    _add("model", ask.model, ask.model_limits, ask, buckets, slots)
    return Scope(
        ask.key,
        ask.owner,
        ask.model_limits,
        tuple(buckets),
        tuple(slots),
        {term.place: term.request_s for term in buckets},
        tuple(
            (term.place, term.limit, burst_s if term.subject != "key" and term.limit else inf)
            for term in buckets
            if term.kind == "tokens"
        ),
        _header_lines(buckets),
    )


def _add(
    subject: Subject,
    name: str,
    limits: LimitSettings,
    ask: LimitRequest,
    buckets: list[BucketTerm],
    slots: list[SlotTerm],
) -> None:
    entered = ask.entered and subject != "model"
    # The name comes last: whatever stands in it, it cannot look like another place.
    limit = limits.requests_per_minute
    if limit is not None:
        place = f"{subject}:requests:{name}"
        request_s = 0.0 if entered else seconds(1, limit)
        buckets.append(BucketTerm(place, subject, name, "requests", limit, request_s))
    limit = limits.tokens_per_minute
    if limit is not None:
        place = f"{subject}:tokens:{name}"
        buckets.append(BucketTerm(place, subject, name, "tokens", limit, 0.0))
    limit = limits.concurrent_requests
    if limit is not None and ask.concurrent and not entered:
        slots.append(SlotTerm(f"{subject}:slots:{name}", subject, name, limit))


def _header_lines(buckets: list[BucketTerm]) -> bytes | None:
    """Return a template with room for what remains and the reset, of the first, then the second."""
    if len(buckets) != 2 or buckets[0].kind == buckets[1].kind:
        return None
    return b"".join(_LINES[term.kind] % (term.limit, b"%d", b"%b") for term in buckets)


def settlement(terms: Terms, tokens: float) -> list[float]:
    """Return what each bucket still has to be charged, in seconds, once `tokens` were used."""
    return [
        seconds(tokens, term.limit) - terms.costs[term.place]
        if term.kind == "tokens" and term.limit
        else 0.0
        for term in terms.buckets
    ]


def undoing(terms: Terms) -> list[float]:
    """Return what takes every charge back."""
    return [-cost_s for cost_s in terms.costs.values()]
