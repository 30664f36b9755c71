"""Limits of what the sessions of one key may ask of the console.

They do not depend on the limits of the key: a key at its limit must be able to find out why, and
an open page refreshes itself every few seconds.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator

from app.console.visitor import Visitor
from app.errors import ServiceUnavailable
from app.limits import ReadLimiter
from app.settings import LimitSettings

# Requests of one key per minute; as many may come at once.
READS = LimitSettings(requests_per_minute=300)
# Pages of one key that are rendered or wait for it at once.
MAX_RENDERS = 16


class VisitLimits:
    """Limits the requests of each key. Without authentication there are no keys to tell apart."""

    def __init__(self) -> None:
        self._reads = ReadLimiter()
        self._renders: Counter[str] = Counter()

    def count(self, visitor: Visitor) -> None:
        """Count a request. Raises RateLimited."""
        if not visitor.logged_in:
            return
        refusal = self._reads.refusal(visitor.principal.id, READS)
        if refusal is not None:
            raise refusal

    @contextlib.contextmanager
    def render(self, visitor: Visitor) -> Iterator[None]:
        """Count a page while it is rendered. Raises ServiceUnavailable."""
        key_id = visitor.principal.id
        if visitor.logged_in and self._renders[key_id] >= MAX_RENDERS:
            raise ServiceUnavailable("too many pages of this key are rendered now; try again")
        self._renders[key_id] += 1
        try:
            yield
        finally:
            self._renders[key_id] -= 1
            self._renders += Counter()  # drops keys without pages
