"""How late the event loop is: the longest that a timer had to wait for its turn, lately.

A loop that is late is late for every stream at once: something computes on it that should not.
"""

import asyncio
from collections.abc import Callable

# A stall that is shorter may fall between two looks.
TICK_S = 0.1
# As long as Prometheus' usual scrape interval, so that a scrape misses nothing.
WINDOW_S = 15.0


class Longest:
    """The largest value of the last `window_s` to twice that, in the memory of two."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._began = 0.0
        self._before = self._now = 0.0

    def note(self, at_s: float, value: float) -> None:
        """Take in a value. Moments do not fall."""
        self._turn(at_s)
        self._now = max(self._now, value)

    def read(self, at_s: float) -> float:
        """Return the largest value, 0 if there was none."""
        self._turn(at_s)
        return max(self._before, self._now)

    def _turn(self, at_s: float) -> None:
        windows = (at_s - self._began) // self._window_s
        if windows >= 1:
            self._before = self._now if windows < 2 else 0.0
            self._now = 0.0
            self._began += windows * self._window_s


class LoopLag:
    """Measures the running loop from `start` to `stop`."""

    def __init__(self) -> None:
        self._longest = Longest(WINDOW_S)
        self._clock: Callable[[], float] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin."""
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._look_after(loop)

    def stop(self) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()

    def read(self) -> float:
        """Return the longest delay in seconds, of the last WINDOW_S at least."""
        return 0.0 if self._clock is None else self._longest.read(self._clock())

    def _look_after(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(TICK_S, self._look, loop, loop.time() + TICK_S)

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now = loop.time()
        self._longest.note(now, max(0.0, now - due_s))
        self._look_after(loop)
