"""When an engine that failed is started again: pure, the clock is the caller's."""

from collections import deque

from engines.spec import Restart


class RestartBudget:
    """Capped exponential backoff, and at most so many restarts within a sliding window."""

    def __init__(self, restart: Restart) -> None:
        self._restart = restart
        # When the restarts of the last `window_s` seconds were granted, the oldest first.
        self._granted: deque[float] = deque()

    def next(self, now: float) -> float | None:
        """Grant a restart: return how many seconds to wait before it; None: the budget is spent."""
        granted, restart = self._granted, self._restart
        while granted and now - granted[0] >= restart.window_s:
            granted.popleft()
        if len(granted) >= restart.budget:
            return None
        # 2.0 ** 1024 does not fit a float, and the cap is reached long before.
        wait = min(restart.backoff_s * 2.0 ** min(len(granted), 64), restart.max_backoff_s)
        granted.append(now)
        return wait

    def renew(self) -> None:
        """Forget the restarts so far: a person has looked at it."""
        self._granted.clear()
