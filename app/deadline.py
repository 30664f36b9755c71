"""A timeout for responses of other services that allows for a late event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from engines.timing import LOOP_GRACE_S


@contextlib.asynccontextmanager
async def deadline(moment: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the body is not done by `moment`, in the loop's time.

    An event loop that is late runs its timers before it reads its sockets: `asyncio.timeout` would
    cancel a wait whose response has arrived. So the loop has one more iteration.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as bound:
        timer = loop.call_at(moment, lambda: bound.reschedule(loop.time() + LOOP_GRACE_S))
        try:
            yield
        finally:
            timer.cancel()
