"""Connections of the database by what they are for, so that pages never delay requests.

Each kind of work has connections of its own and waits for one of them before the pool, which has
room for all. So a wait is in this gateway's own queue: it can be given up at any time, and says
nothing of the database.
"""

import asyncio
from enum import Enum

from app.database.errors import DatabaseBusy
from app.deadline import deadline

# A transaction takes five to twenty round trips to PostgreSQL: one that takes a second for each is
# slow, but no outage.
PATIENCE = 15
# The same for a new connection, which takes up to ten round trips.
CONNECT_PATIENCE = 5


class Lane(Enum):
    """A kind of work: its connections, the longest wait for one in seconds, and `patience`."""

    # Lookups of keys, budgets, stored responses: what requests of clients wait for.
    REQUESTS = (6, 2.0, 1)
    # The ledger and changes of keys, for which no request waits.
    BACKGROUND = (2, 2.0, PATIENCE)
    # Pages of the console, /admin and commands.
    PAGES = (2, 2.0, 1)
    # Sums over many days.
    REPORTS = (2, 1.0, 1)
    # Requests of many days: a million rows take half a second on SQLite.
    SEARCHES = (2, 1.0, 10)

    @property
    def patience(self) -> int:
        """The deadline of a transaction, in multiples of that for which a request waits."""
        return self.value[2]


CONNECTIONS = sum(lane.value[0] for lane in Lane)


class LaneSlots:
    """The free connections of one lane."""

    def __init__(self, lane: Lane) -> None:
        connections, self._wait_s, _ = lane.value
        self._free = asyncio.Semaphore(connections)

    async def acquire(self) -> None:
        """Take a connection. Raises DatabaseBusy."""
        if not self._free.locked():
            await self._free.acquire()
            return
        try:
            async with deadline(asyncio.get_running_loop().time() + self._wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise DatabaseBusy("too many requests wait for the database") from None

    def release(self) -> None:
        """Give a connection back."""
        self._free.release()
