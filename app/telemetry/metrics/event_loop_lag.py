"""Event loop lag: the longest recent delay of a timer.

A late loop delays every stream at once; the cause is a long computation on the loop, or lack of
CPU.
"""

import asyncio
from collections.abc import Callable

# A stall that is shorter may fall between two ticks.
TICK_S = 0.1
# Prometheus' usual scrape interval, so that no scrape misses a stall.
WINDOW_S = 15.0


class WindowedMax:
    """The largest value of the last `window_s` to twice that, in constant memory."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._began = 0.0
        self._previous = self._current = 0.0

    def add(self, at_s: float, value: float) -> None:
        """Add a value. Times do not decrease."""
        self._advance(at_s)
        self._current = max(self._current, value)

    def read(self, at_s: float) -> float:
        """Return the largest value, 0 if there is none."""
        self._advance(at_s)
        return max(self._previous, self._current)

    def _advance(self, at_s: float) -> None:
        windows = (at_s - self._began) // self._window_s
        if windows >= 1:
            self._previous = self._current if windows < 2 else 0.0
            self._current = 0.0
            self._began += windows * self._window_s


class EventLoopLag:
    """Measures the running loop from `start` to `stop`."""

    def __init__(self) -> None:
        self._max = WindowedMax(WINDOW_S)
        self._clock: Callable[[], float] | None = None
        self._on_tick: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """Start measuring the running loop; `on_tick` is called every TICK_S."""
        loop = asyncio.get_running_loop()
        self._clock, self._on_tick = loop.time, on_tick
        self._schedule(loop)

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()

    def read(self) -> float:
        """Return the longest delay in seconds, of the last WINDOW_S at least."""
        return 0.0 if self._clock is None else self._max.read(self._clock())

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(TICK_S, self._tick, loop, loop.time() + TICK_S)

    def _tick(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now = loop.time()
        self._max.add(now, max(0.0, now - due_s))
        self._on_tick()
        self._schedule(loop)
