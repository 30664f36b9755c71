"""Rate limit of GET requests, which do not count against a key's limits.

Clients list the models at every start, and a key at its limit must be able to find out why. But one
of these reads queries the database, so their rate is limited too: each key may make as many reads
per minute as requests, counted separately and per gateway, since Redis would cost more than the
read.
"""

from collections.abc import Callable
from time import monotonic

from app.errors import RateLimited
from app.limits import rate_responses
from app.limits.memory_store import MemoryStore
from app.limits.terms import LimitRequest, terms_of
from app.settings import NO_LIMITS, LimitSettings

BURST_S = 60.0


class ReadLimiter:
    """Limits the reads of each key."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._store = MemoryStore(BURST_S)
        self._clock = clock

    def refusal(self, key_id: str, limits: LimitSettings) -> RateLimited | None:
        """Count a read; return its refusal, or None if it is admitted."""
        reads = LimitSettings(requests_per_minute=limits.requests_per_minute)
        terms = terms_of(LimitRequest(key_id, reads, "", NO_LIMITS, 0, concurrent=False))
        return rate_responses.refusal(terms, self._store.decide(terms, self._clock()), BURST_S)
