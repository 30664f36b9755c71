"""What one request asks of the limits of its key and of its model."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.limits.bucket import seconds
from app.settings import LimitSettings

Subject = Literal["key", "model"]
Kind = Literal["requests", "tokens"]

# No engine takes a longer request; a client may well name a larger number.
MOST_TOKENS = 10**12


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request wants, of two subjects."""

    key_id: str
    key: LimitSettings
    model: str
    model_limits: LimitSettings  # for all keys together
    tokens: int  # reserved: the estimate of the prompt and the bound of the answer
    concurrent: bool = True  # False: it takes no slot


class BucketTerm(NamedTuple):
    """One bucket that a request draws from."""

    place: str  # names the bucket in a store; no two buckets share one
    subject: Subject
    name: str
    kind: Kind
    limit: int
    amount: int
    cost_s: float


class SlotTerm(NamedTuple):
    """One count of requests under way that a request adds to."""

    place: str
    subject: Subject
    name: str
    limit: int


class Terms(NamedTuple):
    """Every limit that a request meets."""

    buckets: list[BucketTerm]
    slots: list[SlotTerm]


class Reading(NamedTuple):
    """A store's answer: what is owed and under way after it, in the order of the terms."""

    admitted: bool
    debts: list[float]
    busy: list[int]


def terms_of(ask: Ask) -> Terms:
    """Return the limits that a request meets; none at all where nothing is limited."""
    buckets: list[BucketTerm] = []
    slots: list[SlotTerm] = []
    _add("key", ask.key_id, ask.key, ask, buckets, slots)
    _add("model", ask.model, ask.model_limits, ask, buckets, slots)
    return Terms(buckets, slots)


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
        cost_s = seconds(1, limit)
        buckets.append(BucketTerm(place, subject, name, "requests", limit, 1, cost_s))
    limit = limits.tokens_per_minute
    if limit is not None:
        place = f"{subject}:tokens:{name}"
        tokens = min(ask.tokens, MOST_TOKENS)
        cost_s = seconds(tokens, limit)
        buckets.append(BucketTerm(place, subject, name, "tokens", limit, tokens, cost_s))
    limit = limits.concurrent_requests
    if limit is not None and ask.concurrent:
        slots.append(SlotTerm(f"{subject}:slots:{name}", subject, name, limit))


def settlement(terms: Terms, tokens: float) -> list[float]:
    """Return what each bucket still has to be charged, in seconds, once `tokens` were used."""
    return [
        seconds(tokens - term.amount, term.limit) if term.kind == "tokens" and term.limit else 0.0
        for term in terms.buckets
    ]


def undoing(terms: Terms) -> list[float]:
    """Return what takes every charge back."""
    return [-term.cost_s for term in terms.buckets]
