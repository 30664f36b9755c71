"""A clock for sources: `sleep` returns when the test lets time pass."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from app.discovery import Endpoint, Source
from tests.waiting import run_pending_tasks, wait_until


@dataclass
class Clock:
    """The time of one source."""

    now: float = 0.0
    # What the source sleeps, one after the other.
    sleeps: list[float] = field(default_factory=list)
    _wakes_at: float | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self._wakes_at = self.now + seconds
        self._wake.clear()
        await self._wake.wait()

    async def asleep(self) -> None:
        """Return when the source sleeps."""
        await wait_until(lambda: self._wakes_at is not None)

    async def advance(self, seconds: float) -> None:
        """Let time pass, with all that the source does in it."""
        end = self.now + seconds
        while True:
            await self.asleep()
            assert self._wakes_at is not None
            if self._wakes_at > end:
                self.now = end
                return
            self.now, self._wakes_at = self._wakes_at, None
            self._wake.set()
            await run_pending_tasks(5)


@dataclass
class Watched:
    """What a source has listed so far, as sorted URLs."""

    lists: list[list[str]] = field(default_factory=list)

    @property
    def last(self) -> list[str]:
        return self.lists[-1]


@asynccontextmanager
async def watching(source: Source) -> AsyncIterator[Watched]:
    """Watch a source while the body runs."""
    watched = Watched()

    async def watch() -> None:
        async for found in source.watch():
            watched.lists.append(urls(found))

    task = asyncio.create_task(watch())
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def urls(endpoints: Iterable[Endpoint]) -> list[str]:
    return sorted(one.url for one in endpoints)
