"""The limits that a request meets: those of its key, of the key's owner, and of its model."""

from math import inf
from typing import Literal, Protocol

import msgspec

from app.limits.bucket import seconds
from app.settings import LimitSettings

LimitSubject = Literal["key", "owner", "model"]
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
# Above the length of any request; clients may send any number.
MAX_TOKENS = 10**12


class LimitOwner(Protocol):
    """The owner of a key, whose limits all its keys share."""

    @property
    def name(self) -> str: ...
    @property
    def limits(self) -> LimitSettings: ...


class LimitRequest(msgspec.Struct, frozen=True, gc=False):
    """A request to be limited, by up to three subjects."""

    key_id: str
    key: LimitSettings
    model: str
    model_limits: LimitSettings  # shared by all keys
    tokens: int  # to reserve: the estimated prompt and the maximum completion
    concurrent: bool = True  # False: it takes no slot
    # Request and slot of key and owner were charged before the body was read, and are not again.
    precharged: bool = False
    owner: LimitOwner | None = None  # None: the key's owner has no limits


class BucketTerm(msgspec.Struct, frozen=True, gc=False):
    """One bucket that a request is charged to."""

    place: str  # unique name of the bucket in a store
    subject: LimitSubject
    name: str
    kind: Kind
    limit: int
    request_s: float  # cost of one request, in seconds of refill; 0: not counted


class SlotTerm(msgspec.Struct, frozen=True, gc=False):
    """One count of concurrent requests that a request adds to."""

    place: str
    subject: LimitSubject
    name: str
    limit: int


class Scope(msgspec.Struct, frozen=True, gc=False):
    """The limits of a key at a model, the same from request to request."""

    buckets: tuple[BucketTerm, ...]
    slots: tuple[SlotTerm, ...]
    costs: dict[str, float]  # by place, in the order of the buckets; token costs are 0 here
    metered: tuple[tuple[str, int, float], ...]  # place, limit and maximum cost of token buckets
    # Template of the rate headers' lines, if there is exactly one bucket of each kind.
    header_lines: bytes | None

    @property
    def places(self) -> list[str]:
        """The places of slots and buckets."""
        return [slot.place for slot in self.slots] + [term.place for term in self.buckets]

    def terms(self, tokens: int) -> "Terms":
        """Return the limits that a request of so many tokens meets."""
        if tokens > MAX_TOKENS:
            tokens = MAX_TOKENS
        costs = self.costs.copy()
        for place, limit, max_s in self.metered:
            cost_s = tokens * 60.0 / limit if limit else seconds(tokens, 0)
            costs[place] = cost_s if cost_s < max_s else max_s
        return Terms(self, costs, tokens)


class Terms(msgspec.Struct, frozen=True, gc=False):
    """The limits that a request meets, and its costs."""

    scope: Scope
    costs: dict[str, float]  # by place, in the order of the buckets, in seconds of refill
    tokens: int


class Reading(msgspec.Struct, frozen=True, gc=False):
    """A store's decision; debts and concurrent requests after it, in the order of the terms."""

    admitted: bool
    debts: list[float]
    busy: list[int]


NO_TERMS = Terms(Scope((), (), {}, (), None), {}, 0)
NOTHING_TAKEN = Reading(True, [], [])


def terms_of(request: LimitRequest, burst_s: float = inf) -> Terms:
    """Return the limits that a request meets; empty if nothing is limited."""
    return scope_of(request, burst_s).terms(request.tokens)


def scope_of(request: LimitRequest, burst_s: float) -> Scope:
    """Return the limits of all requests that differ from this one only in their tokens.

    `burst_s` bounds what one request may reserve of a bucket that several keys share, an owner's or
    a model's: a large request empties the bucket, and never blocks other keys for longer than it
    takes to refill.
    """
    buckets: list[BucketTerm] = []
    slots: list[SlotTerm] = []
    _add("key", request.key_id, request.key, request, buckets, slots)
    if request.owner is not None:
        _add("owner", request.owner.name, request.owner.limits, request, buckets, slots)
    _add("model", request.model, request.model_limits, request, buckets, slots)
    return Scope(
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
    subject: LimitSubject,
    name: str,
    limits: LimitSettings,
    request: LimitRequest,
    buckets: list[BucketTerm],
    slots: list[SlotTerm],
) -> None:
    precharged = request.precharged and subject != "model"
    # The name comes last: whatever it contains, it cannot equal another place.
    limit = limits.requests_per_minute
    if limit is not None:
        place = f"{subject}:requests:{name}"
        request_s = 0.0 if precharged else seconds(1, limit)
        buckets.append(BucketTerm(place, subject, name, "requests", limit, request_s))
    limit = limits.tokens_per_minute
    if limit is not None:
        place = f"{subject}:tokens:{name}"
        buckets.append(BucketTerm(place, subject, name, "tokens", limit, 0.0))
    limit = limits.concurrent_requests
    if limit is not None and request.concurrent and not precharged:
        slots.append(SlotTerm(f"{subject}:slots:{name}", subject, name, limit))


def _header_lines(buckets: list[BucketTerm]) -> bytes | None:
    """Return a template with placeholders for remaining and reset of the two buckets in order."""
    if len(buckets) != 2 or buckets[0].kind == buckets[1].kind:
        return None
    return b"".join(_LINES[term.kind] % (term.limit, b"%d", b"%b") for term in buckets)


def settlement(terms: Terms, tokens: float) -> list[float]:
    """Return the charge still due for each bucket, in seconds, after `tokens` were used."""
    return [
        seconds(tokens, term.limit) - terms.costs[term.place]
        if term.kind == "tokens" and term.limit
        else 0.0
        for term in terms.scope.buckets
    ]
