"""The rate at which a queue is served, and the Retry-After that follows from it. Pure."""

from collections import deque
from math import ceil, sqrt

# Requests in the window: enough for a steady figure, few enough to follow a change.
WINDOW = 32
# RFC 9110 sets no bounds. Within a second nothing changes, and after a minute a retry is cheap.
MIN_RETRY_S, MAX_RETRY_S = 1, 60


def bounded_retry_s(seconds: float) -> int:
    """Return a Retry-After of about so many seconds, within the bounds."""
    return ceil(min(max(seconds, MIN_RETRY_S), MAX_RETRY_S))


def retry_after_s(waiting: int, served: int, seconds: float) -> int:
    """Return the seconds until all waiting requests are served, within the bounds.

    `served` of them were served in the last `seconds`. If none was, the first counts as served now.
    """
    return bounded_retry_s(waiting * seconds / max(served, 1))


class ServiceRate:
    """The times at which the latest requests were served, since the queue was last empty."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=WINDOW + 1)

    def restart(self, now: float) -> None:
        """Begin anew: the first request waits."""
        self._times.clear()
        self._times.append(now)

    def record_served(self, now: float) -> None:
        """Record that a request has left the queue for an engine."""
        self._times.append(now)

    def expected_wait_s(self, ahead: int, now: float) -> float | None:
        """Return the wait of a request behind so many others; None: none was served yet."""
        served = len(self._times) - 1
        return (ahead + 1) * (now - self._times[0]) / served if served > 0 else None

    def likely_wait_s(self, ahead: int, expected_s: float) -> float:
        """Return the expected wait and one standard deviation of it: few requests wait longer.

        As if requests were served at random times, those ahead and those that were measured.
        """
        served = len(self._times) - 1
        return expected_s * (1 + sqrt(1 / (ahead + 1) + 1 / served))

    def retry_after_s(self, waiting: int, now: float) -> int:
        """Return the Retry-After for a request that finds this many waiting."""
        since = self._times[0] if self._times else now
        return retry_after_s(waiting, len(self._times) - 1, now - since)
