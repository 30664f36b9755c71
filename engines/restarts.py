"""The restart policy: backoff and budget. Pure; the caller supplies the time."""

from collections import deque

from engines.spec import Restart

# The reason that clients get for an engine that was given up.
GIVEN_UP = "repeated failures"


def pause_s(restart: Restart, failures: int) -> float:
    """Return the backoff in seconds before the next restart, after so many failures."""
    # 2.0 ** 1024 does not fit a float, and the cap is reached long before.
    return min(restart.backoff_s * 2.0 ** min(failures, 64), restart.max_backoff_s)


class RestartBudget:
    """Capped exponential backoff, and a bound on the restarts within a sliding window of service.

    The window counts seconds of service: in wall-clock time, an engine that loads for minutes and
    crashes would never exhaust the budget.
    """

    def __init__(self, restart: Restart) -> None:
        self._restart = restart
        # The seconds of service at each restart within the window, the oldest first.
        self._granted: deque[float] = deque()

    def next(self, served_s: float) -> float | None:
        """Grant a restart and return its backoff in seconds; None: the budget is exhausted.

        `served_s` is the seconds of service so far, in all runs of the engine.
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
        """Reset the budget after an operator's intervention."""
        self._granted.clear()
