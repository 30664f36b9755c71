"""Timers on a busy event loop. Standard library only."""

import asyncio

# A loop that was not scheduled for a while runs its late timers before it reads its sockets. So a
# timeout counts only after one more iteration, in which the bytes that arrived meanwhile are read.
LOOP_GRACE_S = 0.01


class MovingDeadline:
    """Base of classes with a deadline that each byte or request moves.

    The timer is rescheduled only when it fires, so that a move costs one assignment. Invariant: it
    fires no later than the deadline. A base class, not a member: nothing is allocated for it.
    """

    __slots__ = ("_loop", "_timer", "_timer_due")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0

    def _due(self) -> float | None:
        """Return the loop's time at which the deadline passes; None when nothing is awaited."""
        raise NotImplementedError

    def _expire(self) -> None:
        """Handle a deadline that has passed."""
        raise NotImplementedError

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_at(due, self._on_timer)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        if not self._move_timer():
            self._timer = self._loop.call_later(LOOP_GRACE_S, self._on_grace)

    def _on_grace(self) -> None:
        if not self._move_timer():
            self._expire()

    def _move_timer(self) -> bool:
        """Set the timer for a deadline that has moved or is not needed; False if it has passed."""
        self._timer = None
        due = self._due()
        if due is None:
            return True
        if due > self._loop.time():
            self._set_timer(due)
            return True
        self._timer_due = due
        return False
