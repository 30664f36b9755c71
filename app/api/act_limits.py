"""Limits how often each caller may change something: every change is a record of the audit.

Nothing is dropped from the audit. A change beyond the limit is refused, so that no tenant can flood
the record, however often it loads a model or makes and deletes a key.
"""

from collections.abc import Callable
from time import monotonic

from app.auth import Principal, Role
from app.errors import RateLimited
from app.limits import ReadLimiter
from app.settings import LimitSettings
from app.telemetry.metrics import Metrics

PER_MINUTE = 30
# Seconds of unused changes that a key keeps: the keys of a class, one after the other.
BURST_S = 600.0
_LIMIT = LimitSettings(requests_per_minute=PER_MINUTE)


class ActLimiter:
    """Counts the changes of each caller but administrators, at this gateway."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = monotonic) -> None:
        self._metrics = metrics
        self._acts = ReadLimiter(clock, BURST_S)

    def check(self, principal: Principal) -> None:
        """Count a change by a caller. Raises RateLimited."""
        if principal.role is not Role.ADMIN:
            self.check_id(principal.id)

    def check_id(self, caller_id: str) -> None:
        """Count a change by a caller who is no administrator. Raises RateLimited."""
        refusal = self._acts.refusal(caller_id, _LIMIT)
        if refusal is None:
            return
        self._metrics.rate_limited.add((refusal.limit,))
        raise RateLimited(
            f"this key or account may change something {PER_MINUTE} times a minute; "
            f"try again in {refusal.retry_after_s} s",
            refusal.limit,
            refusal.retry_after_s,
        )
