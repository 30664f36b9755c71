"""Look-ups of keys in the store, under attack too.

The form of a key is public, so anybody can make up keys that are worth a look-up. They must not
keep those waiting whose keys are good. So there are two lanes: one for ids that exist, of which
there are only so many, and one for all others (made up, or made a moment ago by another process),
which has few turns and a short queue. Ids are public too, so all that is presented with one id
shares its look-up: made-up secrets of an id that exists cost one read at a time.

A read proves what it finds, but it disproves only what was presented before it began: the secret
may be newer than the read. Whoever came later waits for the next one.
"""

import asyncio
from asyncio import Future, Task
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

# Reads at once, together fewer than there are connections to the database: others need some.
TURNS = 6
UNKNOWN_TURNS = 2
# Ids whose look-ups are under way or wait.
MAX_WAITING = 1000
MAX_UNKNOWN_WAITING = 100

T = TypeVar("T")


class LaneFull(Exception):
    """Too many look-ups wait already."""


class _Lane:
    def __init__(self, turns: int) -> None:
        self.turns = asyncio.Semaphore(turns)
        self.length = 0


class _LookUp:
    """What waits for one id: a future for each digest that was presented with it."""

    def __init__(self) -> None:
        self.waiting: dict[bytes, Future[None]] = {}
        self.outdated = False  # the key was changed since the present read began
        self.task: Task[None] | None = None


class LookUps(Generic[T]):
    """Look-ups by id. `read` asks the store.

    `settle(key_id, digest, found, final)` remembers what a read says of a digest and returns
    whether that is settled; what it finds is, and where `final`, that it finds nothing.
    """

    def __init__(
        self,
        read: Callable[[str], Awaitable[T]],
        settle: Callable[[str, bytes, T, bool], bool],
    ) -> None:
        self._read = read
        self._settle = settle
        self._existing = _Lane(TURNS)
        self._unknown = _Lane(UNKNOWN_TURNS)
        self._look_ups: dict[str, _LookUp] = {}

    def __len__(self) -> int:
        return len(self._look_ups)

    async def settled(self, key_id: str, digest: bytes, *, exists: bool) -> None:
        """Return when a digest has been settled. Raises LaneFull, and what the read raises."""
        look_up = self._look_ups.get(key_id) or self._begin(key_id, exists)
        future = look_up.waiting.get(digest)
        if future is None:
            future = look_up.waiting[digest] = asyncio.get_running_loop().create_future()
        # A caller that is cancelled does not take the others with it.
        await asyncio.shield(future)

    def outdate(self, changed: Iterable[str]) -> None:
        """Have the reads under way of changed keys made again."""
        for key_id in changed:
            if (look_up := self._look_ups.get(key_id)) is not None:
                look_up.outdated = True

    def outdate_all(self) -> None:
        """Have every read under way made again."""
        self.outdate(self._look_ups)

    async def close(self) -> None:
        """Cancel what is under way, and those who wait for it."""
        look_ups = list(self._look_ups.values())
        tasks = [one.task for one in look_ups if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in look_ups:
            for future in one.waiting.values():
                future.cancel()
        self._look_ups.clear()  # a task that was cancelled before its beginning has not done so

    def _begin(self, key_id: str, exists: bool) -> _LookUp:
        lane, most = self._unknown, MAX_UNKNOWN_WAITING
        if exists:
            lane, most = self._existing, MAX_WAITING
        if lane.length >= most:
            raise LaneFull
        lane.length += 1
        look_up = self._look_ups[key_id] = _LookUp()
        look_up.task = asyncio.create_task(self._run(key_id, look_up, lane), name="look up a key")
        return look_up

    async def _run(self, key_id: str, look_up: _LookUp, lane: _Lane) -> None:
        try:
            while look_up.waiting:
                async with lane.turns:
                    before = frozenset(look_up.waiting)
                    look_up.outdated = False
                    found = await self._read(key_id)
                if not look_up.outdated:
                    for digest in tuple(look_up.waiting):
                        if self._settle(key_id, digest, found, digest in before):
                            look_up.waiting.pop(digest).set_result(None)
        except Exception as error:  # noqa: BLE001 - it is raised for all who wait
            for future in look_up.waiting.values():
                future.set_exception(error)
                future.exception()  # perhaps nobody waits any more
        finally:
            del self._look_ups[key_id]
            lane.length -= 1
