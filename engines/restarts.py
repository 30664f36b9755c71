"""When an engine that failed is started again: pure, the clock is the caller's."""

from collections import deque

from engines.spec import Restart

# What clients are told of an engine that is not started again by itself.
GIVEN_UP = "repeated failures"


def pause_s(restart: Restart, failures: int) -> float:
    """Return how many seconds to wait before a restart, after so many that were in vain."""
    # 2.0 ** 1024 does not fit a float, and the cap is reached long before.
    return min(restart.backoff_s * 2.0 ** min(failures, 64), restart.max_backoff_s)


class RestartBudget:
    """Capped exponential backoff, and at most so many restarts within a sliding window of service.

    By the clock on the wall, an engine that loads for minutes and crashes would never fill it.
    """

    def __init__(self, restart: Restart) -> None:
        self._restart = restart
        # How long it had served when the restarts that count were granted, the oldest first.
        self._granted: deque[float] = deque()

    def next(self, served_s: float) -> float | None:
        """Grant a restart: return how many seconds to wait before it; None: the budget is spent.

        `served_s` is for how many seconds the engine has served so far, in all its runs.
        """
        granted, restart = self._granted, self._restart
        while granted and served_s - granted[0] >= restart.window_s:
            granted.popleft()
        if len(granted) >= restart.budget:
            return None
        wait = pause_s(restart, len(granted))
        granted.append(served_s)
        return wait

    def renew(self) -> None:
        """Forget the restarts so far: a person has looked at it."""
        self._granted.clear()
