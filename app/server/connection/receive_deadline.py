"""The deadline by which a client must have sent what the connection waits for."""

import asyncio
from collections.abc import Callable
from math import inf

from engines.timing import LOOP_GRACE_S


class ReceiveDeadline:
    """Calls `on_expiry` once the deadline has passed.

    The timer is moved when it fires, so that a request sets none. Invariant: it fires by `due`.
    """

    __slots__ = ("_loop", "_on_expiry", "_timer", "_timer_due", "due")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expiry: Callable[[], None]) -> None:
        self._loop = loop
        self._on_expiry = on_expiry
        self.due = inf  # inf while the client waits for the gateway
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = inf

    def expect(self, seconds: float) -> None:
        """Give the client `seconds` from now."""
        self.due = due = self._loop.time() + seconds
        if self._timer is None or due < self._timer_due:
            self._set_timer(due)

    def replace(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` in `seconds`; no deadline is set after this."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, callback)
        self._timer_due = -inf

    def close(self) -> None:
        """Cancel the timer and release the connection."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_expiry = _do_nothing

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self.due == inf:
            return
        if self.due > self._loop.time():
            self._set_timer(self.due)
        else:
            self._timer_due = self.due
            self._timer = self._loop.call_later(LOOP_GRACE_S, self._on_grace_end)

    def _on_grace_end(self) -> None:
        self._timer = None
        if self.due <= self._loop.time():
            self._on_expiry()
        elif self.due != inf:
            self._set_timer(self.due)


def _do_nothing() -> None: ...
