"""A page that is kept for a while, so that requests for it cannot occupy the event loop."""

import time
from collections.abc import Callable

# The share of the time that may be spent on making the page, and what that may make its age.
MAX_SHARE = 0.02
MAX_AGE_S = 1.0


class KeptPage:
    """Makes a page on the event loop, less often the longer that takes. `clock` is in seconds."""

    def __init__(
        self, make: Callable[[], bytes], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._make = make
        self._clock = clock
        self._page = b""
        self._fresh_until = -1.0

    def read(self) -> bytes:
        """Return the page, at most MAX_AGE_S old."""
        began = self._clock()
        if began >= self._fresh_until:
            self._page = self._make()
            ended = self._clock()
            self._fresh_until = ended + min((ended - began) / MAX_SHARE, MAX_AGE_S)
        return self._page
