"""Bounds reads that cost nothing of a key's limits.

Clients list the models at every start, and a key at its limit must be able to find out why: such a
read is no request. But one of them asks the database, so a loop over it must end. Each key may
make as many reads in a minute as requests, counted apart and in this process alone: what is counted
twice by two gateways harms neither, and Redis would cost more than the read.
"""

from collections.abc import Callable
from time import monotonic

from app.errors import RateLimited
from app.limits import rate_headers
from app.limits.memory_store import MemoryStore
from app.limits.terms import LimitRequest, terms_of
from app.settings import NO_LIMITS, LimitSettings

BURST_S = 60.0


class ReadBounds:
    """Counts the reads of each key."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._store = MemoryStore(BURST_S)
        self._clock = clock

    def refusal(self, key_id: str, limits: LimitSettings) -> RateLimited | None:
        """Count a read, and return why it may not be made; None: it may."""
        reads = LimitSettings(requests_per_minute=limits.requests_per_minute)
        terms = terms_of(LimitRequest(key_id, reads, "", NO_LIMITS, 0, concurrent=False))
        return rate_headers.refusal(terms, self._store.decide(terms, self._clock()), BURST_S)
