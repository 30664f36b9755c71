"""Notices when the system clock is set, which moves days of budgets and expiry of keys.

Rate limits and timeouts are of the monotonic clock, which is never set.
"""

import asyncio
import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

CHECK_S = 10.0
# NTP corrects less than this gradually, and a busy machine may be late by some of it.
STEP_S = 5.0


class ClockSteps:
    """Logs each step of the system clock. `wall` and `monotonic` are in seconds."""

    def __init__(
        self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    async def run(self) -> None:
        """Check the clock until canceled."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.check()

    def check(self) -> None:
        """Log a step since the last check."""
        offset = self._wall() - self._monotonic()
        step_s, self._offset = offset - self._offset, offset
        if abs(step_s) >= STEP_S:
            log.warning(
                "the system clock was set %s by %.0f s: budgets, the expiry of keys and the times "
                "of usage follow it, rate limits do not",
                "forward" if step_s > 0 else "back",
                abs(step_s),
            )
