"""How much of its limits a key uses now, for people: pure."""

from math import ceil

import msgspec

from app.limits.bucket import remaining
from app.limits.terms import BucketTerm, LimitRequest, LimitSubject, Reading, Scope, Terms, scope_of


class LimitUse(msgspec.Struct, frozen=True):
    """A limit of a key or its owner, and the part in use."""

    subject: LimitSubject
    name: str
    kind: str  # requests, tokens or concurrency
    limit: int  # per minute, or at once
    most: int  # that can be in use: the limit, or the part of it that can be saved up
    used: int  # above `most` after a large request
    # Seconds until nothing is in use; None: unknown, until the requests in flight end.
    free_s: int | None


def reading_terms(request: LimitRequest, burst_s: float) -> Terms:
    """Return terms that a store refuses or charges nothing for, but reads.

    Slots with a limit of 0 are never taken, and a cost of 0 is no charge.
    """
    scope = scope_of(request, burst_s)
    slots = tuple(msgspec.structs.replace(slot, limit=0) for slot in scope.slots)
    costs = dict.fromkeys(scope.costs, 0.0)
    unread = Scope(scope.buckets, slots, costs, (), None)
    return Terms(unread, costs, 0)


def limit_uses(request: LimitRequest, reading: Reading, burst_s: float) -> list[LimitUse]:
    """Return the use of each limit, given the reading of `reading_terms`."""
    scope = scope_of(request, burst_s)
    uses = [
        _bucket_use(term, debt_s, burst_s)
        for term, debt_s in zip(scope.buckets, reading.debts, strict=True)
    ]
    for slot, busy in zip(scope.slots, reading.busy, strict=True):
        free_s = None if busy else 0
        uses.append(
            LimitUse(slot.subject, slot.name, "concurrency", slot.limit, slot.limit, busy, free_s)
        )
    return uses


def _bucket_use(term: BucketTerm, debt_s: float, burst_s: float) -> LimitUse:
    most = remaining(0.0, term.limit, burst_s)
    used = max(ceil(debt_s * term.limit / 60 - 1e-6), 0)
    return LimitUse(term.subject, term.name, term.kind, term.limit, most, used, ceil(debt_s))
