"""A timeout that tolerates an event loop which is itself late."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from engines.timing import ONE_TURN_S


@contextlib.asynccontextmanager
async def deadline(moment: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the body is not done by a moment of the loop's time.

    On a late loop, timers run before sockets are read: `asyncio.timeout` would cancel a wait whose
    answer has already arrived. So the timeout fires one turn of the loop later.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as bound:
        timer = loop.call_at(moment, lambda: bound.reschedule(loop.time() + ONE_TURN_S))
        try:
            yield
        finally:
            timer.cancel()
