"""How fast requests get out of a queue, and so when to come back. Pure."""

from collections import deque
from math import ceil

# Enough for a steady figure, few enough to follow a change.
WINDOW = 32
# RFC 9110 gives no bounds. Within a second nothing changes, and after a minute one may as well ask.
MIN_RETRY_S, MAX_RETRY_S = 1, 60


def retry_after_s(waiting: int, served: int, seconds: float) -> int:
    """Return after how many seconds those who wait now will have gone, within the bounds.

    `served` of them went in the last `seconds`. If none did, the first is taken to go now.
    """
    left_s = waiting * seconds / max(served, 1)
    return ceil(min(max(left_s, MIN_RETRY_S), MAX_RETRY_S))


class ServiceRate:
    """The moments at which the last requests got out, since somebody began to wait."""

    def __init__(self) -> None:
        self._moments: deque[float] = deque(maxlen=WINDOW + 1)

    def begin(self, now: float) -> None:
        """Note that the first one waits."""
        self._moments.clear()
        self._moments.append(now)

    def served(self, now: float) -> None:
        """Note that one got out."""
        self._moments.append(now)

    def retry_after_s(self, waiting: int, now: float) -> int:
        """Return what to tell one who finds so many waiting."""
        since = self._moments[0] if self._moments else now
        return retry_after_s(waiting, len(self._moments) - 1, now - since)
