"""The deadline by which a client must have sent what the connection waits for."""

import asyncio
from collections.abc import Callable
from math import inf

from engines.timing import MovingDeadline


class ReceiveDeadline(MovingDeadline):
    """Calls `on_expiry` once the deadline has passed. A request sets no timer."""

    __slots__ = ("_on_expiry", "due")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expiry: Callable[[], None]) -> None:
        super().__init__(loop)
        self._on_expiry = on_expiry
        self.due = inf  # inf while the client waits for the gateway

    def expect(self, seconds: float) -> None:
        """Give the client `seconds` from now."""
        self.due = due = self._loop.time() + seconds
        if self._timer is None or due < self._timer_due:
            self._set_timer(due)

    def replace(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` in `seconds`; no deadline is set after this."""
        self._cancel_timer()
        self._timer = self._loop.call_later(seconds, callback)
        self._timer_due = -inf

    def close(self) -> None:
        """Cancel the timer and release the connection."""
        self._cancel_timer()
        self._on_expiry = lambda: None

    def _due(self) -> float | None:
        return None if self.due == inf else self.due

    def _expire(self) -> None:
        self._on_expiry()
