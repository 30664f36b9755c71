"""A timeout for responses of other services that allows for a busy or late event loop.

A response takes several iterations of the event loop, each as long as the work of all connections
that are ready. So time counts less the later the loop is: a tick that is late by its own length
does not count at all.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from engines.timing import LOOP_GRACE_S

TICK_S = 0.1
# The deadline passes after this multiple of its time, however late the loop is.
MAX_STRETCH = 10


@contextlib.asynccontextmanager
async def deadline(moment: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the body is not done by `moment`, in the time of a loop that is idle.

    An event loop that is late runs its timers before it reads its sockets: `asyncio.timeout` would
    cancel a wait whose response has arrived. So the loop has one more iteration.
    """
    async with asyncio.timeout(None) as bound:
        wait = _Wait(bound, moment)
        try:
            yield
        finally:
            wait.end()


class _Wait:
    """Counts the time that is left, tick by tick."""

    __slots__ = ("_bound", "_due", "_last", "_left", "_loop", "_tick_s", "_timer")

    def __init__(self, bound: asyncio.Timeout, moment: float) -> None:
        self._bound = bound
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._left = max(moment - now, 0.0)
        self._last = now + self._left * MAX_STRETCH
        self._next(now)

    def end(self) -> None:
        """Stop counting."""
        self._timer.cancel()

    def _next(self, now: float) -> None:
        self._tick_s = min(self._left, TICK_S)
        self._due = now + self._tick_s
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        self._left -= max(self._tick_s - max(now - self._due, 0.0), 0.0)
        # What is left of a tick that was late by less than that is not worth another one.
        if self._left <= LOOP_GRACE_S or now >= self._last:
            self._bound.reschedule(now + LOOP_GRACE_S)
        else:
            self._next(now)
