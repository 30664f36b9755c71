"""A bound on a wait for somebody else, which does not blame them for our own lateness."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from engines.timing import ONE_TURN_S


@contextlib.asynccontextmanager
async def deadline(moment: float) -> AsyncIterator[None]:
    """Raise TimeoutError where the body is not done by a moment of the loop's time.

    On a loop that was late itself, timers run before what has arrived is read: `asyncio.timeout`
    would cancel a wait whose answer is there. So the loop has one more turn.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as bound:
        timer = loop.call_at(moment, lambda: bound.reschedule(loop.time() + ONE_TURN_S))
        try:
            yield
        finally:
            timer.cancel()
