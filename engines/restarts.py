"""When an engine that failed is started again: capped exponential backoff within a budget. Pure."""

from collections import deque

from engines.spec import Restart


class RestartBudget:
    """The restarts of one engine. A restart counts against the budget for `window_s`."""

    def __init__(self, settings: Restart) -> None:
        self._settings = settings
        self._taken: deque[float] = deque()  # when each restart that still counts was granted

    def next(self, now: float) -> float | None:
        """Take a restart; return how many seconds to wait before it, None when none is left."""
        settings = self._settings
        while self._taken and now - self._taken[0] >= settings.window_s:
            self._taken.popleft()
        if len(self._taken) >= settings.budget:
            return None
        # The exponent is bounded by the budget, which a person wrote; 2.0 ** 1024 would overflow.
        wait = settings.backoff_s * 2.0 ** min(len(self._taken), 64)
        self._taken.append(now)
        return min(wait, settings.max_backoff_s)

    def renew(self) -> None:
        """Forget the restarts so far: a person has looked at it."""
        self._taken.clear()
