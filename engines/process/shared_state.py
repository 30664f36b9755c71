"""The state that the callers of a supervised engine share with the task that owns it."""

import asyncio
import enum
from typing import Any

from engines.base import EngineState, EngineStatus
from engines.lifecycle import Event


class DesiredState(enum.Enum):
    """The state that callers want; the owner task moves the engine there."""

    RUNNING = enum.auto()
    DRAINED = enum.auto()
    ASLEEP = enum.auto()
    STOPPED = enum.auto()


class SharedState:
    """The actual state, which the owner task writes, and the desired one, which callers write."""

    def __init__(self, status: EngineStatus, sleep_level: int) -> None:
        self.status = status
        self.desired = DesiredState.STOPPED
        # READY and wanted to run: requests are accepted. Derived here, so that a request reads one
        # attribute.
        self.accepts = False
        # The arguments of the latest stop and sleep.
        self.grace = 0.0
        self.sleep_level = sleep_level
        # The engine is left running for the next gateway; nothing changes it from here any more.
        self.released = False
        # Set when a request failed in a way that makes a check of the engine due at once.
        self.suspicion = asyncio.Event()

    def fire(self, event: Event) -> None:
        """Move to the state that follows. For the owner task only. Raises IllegalTransition."""
        self.status.fire(event)
        self._update()

    def set_desired(self, desired: DesiredState) -> None:
        """Set the desired state; wake the owner task and callers that wait for a change."""
        self.desired = desired
        self.notify()

    def notify(self) -> None:
        """Wake everything that waits for a change."""
        self._update()
        self.status.changes.notify()

    @property
    def stopping(self) -> bool:
        """True when the engine is to be stopped."""
        return self.desired is DesiredState.STOPPED

    async def wait_for_first(
        self,
        *futures: asyncio.Future[Any],
        timeout: float | None = None,
        change: asyncio.Future[None] | None = None,
    ) -> None:
        """Return when a future is done, at a change (default: the next), or after `timeout`."""
        change = change or self.status.changes.next()
        try:
            waited = {change, *futures}
            await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()

    def _update(self) -> None:
        ready = self.status.state is EngineState.READY
        self.accepts = ready and self.desired is DesiredState.RUNNING
