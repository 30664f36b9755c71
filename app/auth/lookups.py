"""Lookups of keys in the store, bounded so that guessed keys cannot delay valid ones.

The format of a key is public, so anyone can generate keys that require a lookup. There are two
queues: one for IDs that exist, whose number is limited, and one for all others (guessed, or created
a moment ago by another process), which has low concurrency and a short queue. IDs are public too,
so all secrets presented with one ID share its lookup: guessed secrets of an existing ID cost one
read at a time.

A read confirms the secrets that it finds, but refutes only those presented before it began: a
secret may be newer than the read. Secrets presented later wait for the next read.
"""

import asyncio
from asyncio import Future, Task
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

# Concurrent reads; together fewer than the connections of Lane.REQUESTS, which others need too.
MAX_READS = 3
MAX_UNKNOWN_READS = 1
# IDs with a pending lookup, running ones included.
MAX_PENDING = 1000
MAX_UNKNOWN_PENDING = 100

T = TypeVar("T")


class LookupQueueFull(Exception):
    """Too many lookups are pending."""


class _Queue:
    def __init__(self, max_reads: int, max_pending: int) -> None:
        self.reads = asyncio.Semaphore(max_reads)
        self.max_pending = max_pending
        self.pending = 0


class _Lookup:
    """The lookup of one ID: a future per digest that was presented with it."""

    def __init__(self) -> None:
        self.waiting: dict[bytes, Future[None]] = {}
        self.outdated = False  # the key was changed since the current read began
        self.task: Task[None] | None = None


class LookupQueues(Generic[T]):
    """Runs lookups by ID; `read` queries the store.

    `cache_result(key_id, digest, found, final)` caches the result of a read for a digest and
    returns whether it is conclusive: a match always is, a mismatch only if `final`.
    """

    def __init__(
        self,
        read: Callable[[str], Awaitable[T]],
        cache_result: Callable[[str, bytes, T, bool], bool],
    ) -> None:
        self._read = read
        self._cache_result = cache_result
        self._existing = _Queue(MAX_READS, MAX_PENDING)
        self._unknown = _Queue(MAX_UNKNOWN_READS, MAX_UNKNOWN_PENDING)
        self._lookups: dict[str, _Lookup] = {}

    def __len__(self) -> int:
        return len(self._lookups)

    async def wait_for_result(self, key_id: str, digest: bytes, *, exists: bool) -> None:
        """Wait until the lookup of a digest has a result.

        Raises LookupQueueFull and errors of the read.
        """
        lookup = self._lookups.get(key_id) or self._begin(key_id, exists)
        future = lookup.waiting.get(digest)
        if future is None:
            future = lookup.waiting[digest] = asyncio.get_running_loop().create_future()
        # The cancellation of one caller must not cancel the lookup of the others.
        await asyncio.shield(future)

    def outdate(self, changed: Iterable[str]) -> None:
        """Repeat the running reads of changed keys."""
        for key_id in changed:
            if (lookup := self._lookups.get(key_id)) is not None:
                lookup.outdated = True

    def outdate_all(self) -> None:
        """Repeat every running read."""
        self.outdate(self._lookups)

    async def close(self) -> None:
        """Cancel running lookups and their callers."""
        lookups = list(self._lookups.values())
        tasks = [one.task for one in lookups if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in lookups:
            for future in one.waiting.values():
                future.cancel()
        self._lookups.clear()  # a task canceled before it started has not removed its own

    def _begin(self, key_id: str, exists: bool) -> _Lookup:
        queue = self._existing if exists else self._unknown
        if queue.pending >= queue.max_pending:
            raise LookupQueueFull
        queue.pending += 1
        lookup = self._lookups[key_id] = _Lookup()
        lookup.task = asyncio.create_task(self._run(key_id, lookup, queue), name="look up a key")
        return lookup

    async def _run(self, key_id: str, lookup: _Lookup, queue: _Queue) -> None:
        try:
            while lookup.waiting:
                async with queue.reads:
                    before = frozenset(lookup.waiting)
                    lookup.outdated = False
                    found = await self._read(key_id)
                if not lookup.outdated:
                    for digest in tuple(lookup.waiting):
                        if self._cache_result(key_id, digest, found, digest in before):
                            lookup.waiting.pop(digest).set_result(None)
        except Exception as error:  # noqa: BLE001 - raised in every waiting caller
            for future in lookup.waiting.values():
                future.set_exception(error)
                future.exception()  # retrieved, in case all callers are gone
        finally:
            del self._lookups[key_id]
            queue.pending -= 1
