"""Transactions on the database, each with a deadline, and translation of foreign errors.

SQLite runs in WAL mode: readers do not wait for the writer. On both databases every transaction has
a deadline, so a database that hangs costs a bounded wait and never blocks the gateway. No deadline
interrupts the opening of a connection: what is opened nevertheless would be left beside the pool.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from weakref import WeakSet

import aiosqlite
from sqlalchemy import AdaptedConnection, Connection, Engine, Select, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from app.database.errors import (
    DatabaseBusy,
    DatabaseError,
    DatabaseUnavailable,
    NewerDatabase,
    translate,
)
from app.database.lanes import CONNECT_PATIENCE, CONNECTIONS, Lane, LaneSlots
from app.database.migrate import NewerTables, has_newest_tables, is_current, is_made, upgrade
from app.database.sqlite_file import disk_fault, make_private
from app.deadline import deadline

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

# Maximum duration of a transaction, in which a connection may be opened; times `Lane.patience`.
DEADLINE_S = 2.0
# A migration may rewrite a table.
MIGRATION_DEADLINE_S = 600.0
# SQLite's wait for another writer; shorter than DEADLINE_S, so that the error names the cause.
BUSY_TIMEOUT_MS = 1500
# Of each connection to SQLite. NORMAL: a killed process loses nothing; a power cut may lose the
# last commits, not the file.
_PRAGMAS = f"""
    PRAGMA journal_mode=WAL;
    PRAGMA synchronous=NORMAL;
    PRAGMA busy_timeout={BUSY_TIMEOUT_MS};
    PRAGMA foreign_keys=ON;
"""
# Statements that SQLite keeps ready, of 128 by default: the ledger's largest take 150 KiB each.
CACHED_STATEMENTS = 16
# Interval of connection attempts to a database that was down at start-up.
RETRY_S = 1.0


class Database:
    """Migrates the tables in `open`; `read` and `write` are transactions."""

    def __init__(self, url: str, *, deadline_s: float = DEADLINE_S) -> None:
        self._url = make_url(url)
        self._deadline_s = deadline_s
        self._engine = make_engine(url, deadline_s)
        self._writing = self._engine.execution_options(writing=True)
        self._threaded = _threaded_engine(self._url)
        # Of `fetch` and `transact`: one thread each, so that either costs one visit to it, and no
        # query of a request waits for a writer.
        self._fetching = ThreadPoolExecutor(1, "database")
        self._writing_thread = ThreadPoolExecutor(1, "database writer")
        self._slots = {lane: LaneSlots(lane) for lane in Lane}
        # Connections that are opened after their transactions have been canceled.
        self._abandoned: set[asyncio.Task[None]] = set()
        # One per connection to SQLite.
        self._threads: WeakSet[Thread] = WeakSet()
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine.sync_engine, "do_connect", self._set_connection_factory)
        self._migrated = False
        self._opening: asyncio.Task[None] | None = None
        # The connection of `version`. It writes nothing: data_version ignores one's own commits.
        self._observer: Connection | None = None
        self._observers = 0  # opened so far; versions of two connections cannot be compared

    def __repr__(self) -> str:
        return f"<Database {self._url.render_as_string(hide_password=True)}>"

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._engine.dialect.name

    async def is_made(self) -> bool:
        """Return whether a gateway has made the tables; create nothing. Raises DatabaseError."""
        if self.dialect == "sqlite" and not await asyncio.to_thread(_has_file, self._url):
            return False
        async with self._translated(self._deadline_s):
            return await is_made(self._engine)

    async def is_current(self) -> bool:
        """Return whether the tables have this gateway's version; create a missing SQLite file.

        Raises DatabaseError.
        """
        if self.dialect == "sqlite" and (file := self._url.database) and file != ":memory:":
            try:
                make_private(Path(file))
                # If aiosqlite cannot open a file, its thread outlives the loop and warns.
                sqlite3.connect(file).close()
            except OSError as error:
                raise DatabaseUnavailable(f"{file}: {error.strerror}") from None
            except sqlite3.Error as error:
                raise DatabaseUnavailable(f"{file}: {error}") from None
        threaded = self._threaded
        if threaded is None:
            async with self._translated(self._deadline_s):
                self._migrated = await is_current(self._engine)
            return self._migrated

        def run() -> bool:
            with threaded.connect() as connection:
                return has_newest_tables(connection)

        self._migrated = await self._visit(self._fetching, run, Lane.REQUESTS)
        return self._migrated

    async def migrate(self) -> None:
        """Upgrade the tables to this version. Raises DatabaseError."""
        if await self.is_current():
            return
        async with self._translated(MIGRATION_DEADLINE_S):
            await upgrade(self._engine.execution_options(writing=True, migrating=True))
            self._migrated = True

    async def open(self) -> None:
        """Upgrade the tables to this version; while the database is down, retry in background."""
        try:
            await self.migrate()
        except DatabaseError as error:
            hint = self._disk_hint()
            log.error("database not opened: %s%s; retrying every %g s", error, hint, RETRY_S)
            opening = self._open_later(str(error))
            self._opening = asyncio.create_task(opening, name="open the database")

    def _disk_hint(self) -> str:
        """Return why SQLite's file cannot be opened, in words that its own errors lack."""
        file = self._url.database if self.dialect == "sqlite" else None
        fault = disk_fault(Path(file)) if file else None
        return f" ({fault})" if fault else ""

    async def _open_later(self, fault: str) -> None:
        while not self._migrated:
            await asyncio.sleep(RETRY_S)
            try:
                await self.migrate()
            except DatabaseError as error:
                if str(error) != fault:
                    fault = str(error)
                    log.error("database not opened: %s", fault)
        log.info("database opened")

    async def close(self) -> None:
        """Close every connection."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        faults = SQLAlchemyError, OSError, TimeoutError
        with contextlib.suppress(*faults):
            async with asyncio.timeout(self._deadline_s):
                while self._abandoned:
                    await asyncio.wait(self._abandoned)
                await self._dispose()
                # Last: what one of them writes may take longer.
                threads = self._fetching, self._writing_thread
                for one in threads:
                    one.shutdown(wait=False, cancel_futures=True)
                for one in threads:
                    await asyncio.to_thread(one.shutdown)
        if self._threaded is not None:
            with contextlib.suppress(*faults):
                if self._observer is not None:
                    self._observer.close()
            self._threaded.dispose()
        # A statement whose caller was canceled continues in its thread, which then calls the loop;
        # so the thread must end before the loop does.
        for thread in list(self._threads):
            if thread.is_alive():
                await asyncio.to_thread(thread.join, self._deadline_s)

    async def _dispose(self) -> None:
        """Close the pool's connections; once interrupted, terminate the others without waiting."""
        pool = self._engine.pool
        try:
            await self._engine.dispose()
        finally:
            if isinstance(pool, AsyncAdaptedQueuePool):
                while pool.checkedin():
                    pool._do_get().invalidate()

    def _set_connection_factory(
        self, _: object, __: object, ___: object, options: dict[str, Any]
    ) -> None:
        options["async_creator_fn"] = self._new_connection

    def _new_connection(self, *arguments: Any, **options: Any) -> aiosqlite.Connection:
        """Return a connection to be awaited; record its thread even if opening is canceled."""
        # As long as for the switch to WAL, of which the driver's own 5 s is more than a deadline.
        options |= {"cached_statements": CACHED_STATEMENTS, "timeout": BUSY_TIMEOUT_MS / 1000}
        connection = aiosqlite.connect(*arguments, **options)
        thread = connection._thread  # SQLAlchemy does the same
        thread.daemon = True
        self._threads.add(thread)
        return connection

    async def fetch(self, query: Select[Any], lane: Lane = Lane.REQUESTS) -> Sequence[Any]:
        """Return the rows of one short query. Raises DatabaseError.

        On SQLite it takes one visit to a thread, where a transaction of `read` makes a dozen: each
        takes two turns of the event loop, which may be busy.
        """
        self._require_tables()
        threaded = self._threaded
        if threaded is None:
            async with self.read(lane) as connection:
                return list(await connection.execute(query))

        def run() -> list[Any]:
            with threaded.connect() as connection:
                return list(connection.execute(query))

        return await self._visit(self._fetching, run, lane)

    async def transact(self, function: Callable[[Connection], ResultT], lane: Lane) -> ResultT:
        """Return the result of a function in a transaction: one of `write`, with its errors.

        On SQLite it takes one visit to a thread, as `fetch` does: half the CPU time of a dozen.
        """
        self._require_tables()
        threaded = self._threaded
        if threaded is None:
            async with self.write(lane) as connection:
                return await connection.run_sync(function)

        given_up = False

        def run() -> ResultT:
            with threaded.connect() as connection:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                result = function(connection)
                if not given_up:  # else it is rolled back
                    connection.commit()
                return result

        try:
            return await self._visit(self._writing_thread, run, lane)
        finally:
            given_up = True

    async def _visit(
        self, thread: ThreadPoolExecutor, function: Callable[[], ResultT], lane: Lane
    ) -> ResultT:
        async with self._translated(self._deadline_s * lane.patience):
            return await asyncio.get_running_loop().run_in_executor(thread, function)

    @contextlib.asynccontextmanager
    async def read(self, lane: Lane = Lane.PAGES) -> AsyncIterator[AsyncConnection]:
        """Open a read-only transaction. Raises DatabaseError."""
        self._require_tables()
        async with self._connection(self._engine, lane) as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def write(self, lane: Lane = Lane.PAGES) -> AsyncIterator[AsyncConnection]:
        """Open a transaction: committed at the end, rolled back by an exception.

        Raises DatabaseError; after DatabaseUnavailable a commit under way may have succeeded.
        """
        self._require_tables()
        async with self._connection(self._writing, lane) as connection, connection.begin():
            yield connection

    @contextlib.asynccontextmanager
    async def _connection(self, engine: AsyncEngine, lane: Lane) -> AsyncIterator[AsyncConnection]:
        """Open a connection of a lane, for one transaction. Raises DatabaseError."""
        slots = self._slots[lane]
        try:
            await slots.acquire()
        except DatabaseBusy:
            if self._abandoned:
                raise DatabaseUnavailable("the database opens no connection") from None
            raise
        deadline_s = self._deadline_s * lane.patience
        async with self._translated(deadline_s), contextlib.AsyncExitStack() as stack:
            stack.callback(slots.release)
            yield await self._open(engine, stack)

    async def _open(self, engine: AsyncEngine, stack: contextlib.AsyncExitStack) -> AsyncConnection:
        """Return a connection that `stack` closes.

        If the caller is canceled, the stack is closed once the connection has been opened.
        """
        connection = engine.connect()
        opening = asyncio.create_task(connection.start(), name="open a connection")
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            closing = asyncio.create_task(_close(opening, stack.pop_all()), name="close it again")
            self._abandoned.add(closing)
            closing.add_done_callback(self._abandoned.discard)
            raise
        stack.push_async_exit(connection)
        return connection

    async def version(self) -> tuple[int, int] | None:
        """Return a value that changes with every commit; None where the database has none.

        It is SQLite's data_version (https://www.sqlite.org/pragma.html#pragma_data_version), at
        a fifteenth of the cost of a transaction. Raises DatabaseError.
        """
        self._require_tables()
        threaded = self._threaded
        if threaded is None:
            return None  # in memory there is one connection, whose own commits do not count

        def run() -> tuple[int, int]:
            observer, self._observer = self._observer, None
            if observer is None:
                observer = threaded.connect()
                self._observers += 1
            with contextlib.ExitStack() as undo:
                undo.callback(observer.close)
                undo.callback(observer.invalidate)
                driver: Any = observer.connection.driver_connection
                # Without SQLAlchemy, which would begin a transaction.
                ((number,),) = driver.execute("PRAGMA data_version").fetchall()
                undo.pop_all()
            self._observer = observer
            return self._observers, int(number)

        return await self._visit(self._fetching, run, Lane.REQUESTS)

    def _require_tables(self) -> None:
        if not self._migrated:
            raise DatabaseUnavailable("the database has not been reached yet")

    @contextlib.asynccontextmanager
    async def _translated(self, deadline_s: float) -> AsyncIterator[None]:
        """Apply a deadline and translate every foreign error."""
        try:
            async with deadline(asyncio.get_running_loop().time() + deadline_s):
                yield
        except TimeoutError:
            raise DatabaseUnavailable(
                f"the database does not answer: nothing within {deadline_s:g} s"
            ) from None
        except NewerTables as error:
            raise NewerDatabase(str(error)) from None
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            raise translate(error) from None


async def _close(opening: asyncio.Task[AsyncConnection], stack: contextlib.AsyncExitStack) -> None:
    async with stack:
        with contextlib.suppress(SQLAlchemyError, sqlite3.Error, OSError):
            await (await opening).close()


def make_engine(url: str, deadline_s: float = DEADLINE_S) -> AsyncEngine:
    """Return connections to a database; nothing is connected yet."""
    options: dict[str, Any] = {}
    if make_url(url).database not in (None, "", ":memory:"):  # in memory there is no pool
        # One more for what reads no tables: migrations.
        options = {"pool_size": CONNECTIONS + 1, "max_overflow": 0, "pool_use_lifo": True}
    if url.startswith("postgresql"):
        options |= {
            "pool_timeout": deadline_s,
            "pool_pre_ping": True,  # a connection may have died with its server
            "connect_args": {
                "timeout": deadline_s * CONNECT_PATIENCE,
                "command_timeout": MIGRATION_DEADLINE_S,
                # A gateway that vanished must not keep rows locked.
                "server_settings": {"idle_in_transaction_session_timeout": "10s"},
            },
        }
    # hide_parameters: an error must not show a digest.
    engine = create_async_engine(url, hide_parameters=True, **options)
    if engine.dialect.name == "sqlite":
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _has_file(url: URL) -> bool:
    return url.database in (None, "", ":memory:") or Path(str(url.database)).is_file()


def _threaded_engine(url: URL) -> Engine | None:
    """Return the engine of `fetch` and `transact`; None: there is no file of SQLite."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    options = {"cached_statements": CACHED_STATEMENTS, "timeout": BUSY_TIMEOUT_MS / 1000}
    engine = create_engine(url.set(drivername="sqlite"), hide_parameters=True, connect_args=options)
    event.listen(engine, "connect", _prepare_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: object) -> None:
    # SQLAlchemy's documented recipe: the driver must not begin transactions by itself.
    connection.isolation_level = None
    if isinstance(connection, AdaptedConnection):  # one visit to its thread, not four for each
        connection.run_async(_set_pragmas)
    else:
        _set_pragmas_here(connection)


async def _set_pragmas(connection: aiosqlite.Connection) -> None:
    """Set them when no other gateway does: SQLite waits for none that switches to WAL as well."""
    until = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            await connection.executescript(_PRAGMAS)
            return
        except sqlite3.OperationalError as error:
            _raise_unless_busy(error, until)
        await asyncio.sleep(0.01)


def _set_pragmas_here(connection: sqlite3.Connection) -> None:
    until = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.executescript(_PRAGMAS)
            return
        except sqlite3.OperationalError as error:
            _raise_unless_busy(error, until)
        time.sleep(0.01)


def _raise_unless_busy(error: sqlite3.OperationalError, until: float) -> None:
    if time.monotonic() > until or error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
        raise error


def _begin_sqlite(connection: Any) -> None:
    # IMMEDIATE: no other connection may write between the reads and writes of a transaction.
    options = connection.get_execution_options()
    if options.get("migrating"):  # another gateway's migration may take as long
        connection.exec_driver_sql(f"PRAGMA busy_timeout={MIGRATION_DEADLINE_S * 1000:.0f}")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("writing") else "BEGIN")
    if options.get("migrating"):
        connection.exec_driver_sql(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
