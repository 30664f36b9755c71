"""SQLAlchemy Core for asyncio: the part of `sqlalchemy.ext.asyncio` that the gateway uses.

That package imports SQLAlchemy's ORM, which takes 7 MiB and is not used here. As there, the classes
wrap Core's own: each call runs in a greenlet, from which the dialects of asyncio drivers await the
driver (docs/decisions/0029-memory.md).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, CursorResult, Executable, NestedTransaction, ScalarResult
from sqlalchemy.engine import Dialect, Engine, create_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool
from sqlalchemy.util import greenlet_spawn

T = TypeVar("T")


class AsyncConnection:
    """Wraps a Core connection, which holds a driver's connection from the pool."""

    __slots__ = ("_sync",)

    def __init__(self, sync: Connection) -> None:
        self._sync = sync

    @property
    def dialect(self) -> Dialect:
        """The dialect in use."""
        return self._sync.dialect

    async def execute(
        self,
        statement: Executable,
        parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> "CursorResult[*tuple[Any, ...]]":
        """Run a statement; all rows of its result have been read."""
        return await greenlet_spawn(self._sync.execute, statement, parameters)

    async def scalar(self, statement: Executable) -> Any:
        """Return the first column of the first row, None without rows."""
        return (await self.execute(statement)).scalar()

    async def scalars(self, statement: Executable) -> ScalarResult[Any]:
        """Return the first column of each row."""
        return (await self.execute(statement)).scalars()

    async def exec_driver_sql(
        self, statement: str, parameters: tuple[Any, ...] | None = None
    ) -> "CursorResult[*tuple[Any, ...]]":
        """Run a statement in the driver's own SQL, not parsed by SQLAlchemy."""
        return await greenlet_spawn(self._sync.exec_driver_sql, statement, parameters)

    async def begin_nested(self) -> "AsyncSavepoint":
        """Set a savepoint in the transaction."""
        return AsyncSavepoint(await greenlet_spawn(self._sync.begin_nested))

    async def driver_connection(self) -> Any:
        """Return the driver's connection."""
        pooled = await greenlet_spawn(getattr, self._sync, "connection")
        return pooled.driver_connection

    async def run_sync(self, function: Callable[[Connection], T]) -> T:
        """Run a function on Core's connection; its statements do not block the event loop."""
        return await greenlet_spawn(function, self._sync)

    async def invalidate(self) -> None:
        """Close the driver's connection instead of returning it to the pool."""
        await greenlet_spawn(self._sync.invalidate)

    async def close(self) -> None:
        """Roll back what was not committed and return the driver's connection to the pool."""
        await greenlet_spawn(self._sync.close)


class AsyncSavepoint:
    """A savepoint within a transaction."""

    __slots__ = ("_sync",)

    def __init__(self, sync: NestedTransaction) -> None:
        self._sync = sync

    async def rollback(self) -> None:
        """Undo every statement since the savepoint."""
        await greenlet_spawn(self._sync.rollback)


class AsyncEngine:
    """A dialect and a pool of connections."""

    def __init__(self, sync: Engine) -> None:
        self.sync_engine = sync

    @property
    def dialect(self) -> Dialect:
        """The dialect in use."""
        return self.sync_engine.dialect

    def execution_options(self, **options: Any) -> "AsyncEngine":
        """Return the same engine with execution options."""
        return AsyncEngine(self.sync_engine.execution_options(**options))

    async def open_connection(self) -> AsyncConnection:
        """Return a connection, which the caller closes."""
        return AsyncConnection(await greenlet_spawn(self.sync_engine.connect))

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection for a block; uncommitted changes are rolled back."""
        connection = await self.open_connection()
        try:
            yield connection
        finally:
            await _uninterrupted(connection.close())

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection for a block that is one transaction."""
        async with self.connect() as connection:
            await connection.run_sync(Connection.begin)
            yield connection
            await connection.run_sync(Connection.commit)

    async def dispose(self) -> None:
        """Close the pool's connections; once interrupted, terminate the others without waiting."""
        pool = self.sync_engine.pool
        try:
            await greenlet_spawn(self.sync_engine.dispose)
        finally:
            if isinstance(pool, AsyncAdaptedQueuePool):
                while pool.checkedin():
                    pool._do_get().invalidate()


def create_async_engine(url: str, **options: Any) -> AsyncEngine:
    """Return an engine for the URL of an asyncio driver; options are those of `create_engine`."""
    return AsyncEngine(create_engine(url, **options))


async def _uninterrupted(coroutine: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine to its end, and only then raise a cancellation that came meanwhile.

    Otherwise a connection could return to a pool that is already closed.
    """
    task = asyncio.create_task(coroutine)
    canceled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            canceled = error
    if canceled is not None:
        raise canceled
    task.result()
