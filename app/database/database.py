"""The one door to the database: connections, deadlines, and one error for everything that fails.

SQLite is in WAL mode: readers do not wait for the writer. There, and on PostgreSQL, every use has a
deadline, so a database that hangs costs a bounded wait and never the gateway.
"""

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Thread
from typing import Any
from weakref import WeakSet

import aiosqlite
from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from app.database.async_engine import AsyncConnection, AsyncEngine, create_async_engine
from app.database.migrate import NewerTables, is_current, upgrade
from app.database.sqlite_file import make_private
from app.deadline import deadline

log = logging.getLogger(__name__)

# How long one transaction may take, waiting for a connection included.
DEADLINE_S = 2.0
# A migration may rewrite a table.
MIGRATION_DEADLINE_S = 600.0
# Statements that SQLite keeps ready, of 128 by default: the ledger's largest take 150 KiB each.
CACHED_STATEMENTS = 16
# How often a database that was down at the start is tried again.
RETRY_S = 1.0


class DatabaseUnavailable(Exception):
    """The database did not answer in time, or not at all. The message holds no password."""


class NewerDatabase(DatabaseUnavailable):
    """A newer gateway has changed the tables, and there is no way back but a copy."""


class Refused(DatabaseUnavailable):
    """The database took no offence at being asked, but at these values: never will it take them."""


class Database:
    """The tables, once `open` has seen to them; `read` and `write` are transactions."""

    def __init__(self, url: str, *, deadline_s: float = DEADLINE_S) -> None:
        self._url = make_url(url)
        self._deadline_s = deadline_s
        self._engine = _engine(url, deadline_s)
        self._writing = self._engine.execution_options(writing=True)
        # One for each of SQLite's connections.
        self._threads: WeakSet[Thread] = WeakSet()
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine.sync_engine, "do_connect", self._have_begun)
        self._migrated = False
        self._opening: asyncio.Task[None] | None = None
        # What `version` asks on. It writes nothing: a connection does not hear of its own commits.
        self._observer: AsyncConnection | None = None
        self._observers = 0  # so far; the numbers of two of them cannot be compared
        self._observing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Database {self._url.render_as_string(hide_password=True)}>"

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._engine.dialect.name

    async def is_current(self) -> bool:
        """Return whether the tables are of this version; an SQLite file is made if it is missing.

        Raises DatabaseUnavailable and NewerDatabase.
        """
        if self.dialect == "sqlite" and (file := self._url.database) and file != ":memory:":
            try:
                make_private(Path(file))
                # Where aiosqlite cannot open a file, its thread outlives the loop, and says so.
                sqlite3.connect(file).close()
            except OSError as error:
                raise DatabaseUnavailable(f"{file}: {error.strerror}") from None
            except sqlite3.Error as error:
                raise DatabaseUnavailable(f"{file}: {error}") from None
        async with self._translated(self._deadline_s):
            self._migrated = await is_current(self._engine)
            return self._migrated

    async def migrate(self) -> None:
        """Bring the tables to this version. Raises DatabaseUnavailable and NewerDatabase."""
        if await self.is_current():
            return
        async with self._translated(MIGRATION_DEADLINE_S):
            await upgrade(self._writing)
            self._migrated = True

    async def open(self) -> None:
        """Bring the tables to this version; where the database is down, go on trying behind."""
        try:
            await self.migrate()
        except DatabaseUnavailable as error:
            log.error("%s; trying again every %g s", error, RETRY_S)
            opening = self._open_later(str(error))
            self._opening = asyncio.create_task(opening, name="open the database")

    async def _open_later(self, fault: str) -> None:
        while not self._migrated:
            await asyncio.sleep(RETRY_S)
            try:
                await self.migrate()
            except DatabaseUnavailable as error:
                if str(error) != fault:
                    fault = str(error)
                    log.error("%s", fault)
        log.info("the database is there")

    async def close(self) -> None:
        """Close every connection."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        with contextlib.suppress(SQLAlchemyError, OSError, TimeoutError):
            async with asyncio.timeout(self._deadline_s):
                if self._observer is not None:
                    await self._observer.close()
                await self._engine.dispose()
        # A statement whose waiter was cancelled goes on in its thread, which then tells the loop;
        # so the loop must not end before it.
        for thread in list(self._threads):
            if thread.is_alive():
                await asyncio.to_thread(thread.join, self._deadline_s)

    def _have_begun(self, _: object, __: object, ___: object, options: dict[str, Any]) -> None:
        options["async_creator_fn"] = self._begin

    def _begin(self, *arguments: Any, **options: Any) -> aiosqlite.Connection:
        """Return a connection to be awaited; its thread is known even if nobody does to the end."""
        options["cached_statements"] = CACHED_STATEMENTS
        connection = aiosqlite.connect(*arguments, **options)
        thread = connection._thread  # as SQLAlchemy itself reaches for it
        thread.daemon = True
        self._threads.add(thread)
        return connection

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that changes nothing. Raises DatabaseUnavailable."""
        self._check()
        async with self._translated(self._deadline_s), self._engine.connect() as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction: committed at the end, rolled back by an exception.

        Raises DatabaseUnavailable, after which nothing is known of a commit under way.
        """
        self._check()
        async with self._translated(self._deadline_s), self._writing.begin() as connection:
            yield connection

    async def version(self) -> tuple[int, int] | None:
        """Return what is equal until somebody commits; None: the database does not tell.

        That is SQLite's data_version (https://www.sqlite.org/pragma.html#pragma_data_version), for
        a fifteenth of what a transaction costs. Raises DatabaseUnavailable.
        """
        self._check()
        if self.dialect != "sqlite" or self._url.database in (None, "", ":memory:"):
            return None  # in memory there is one connection, which hears nothing of itself
        async with self._translated(self._deadline_s), self._observing:
            observer, self._observer = self._observer, None
            if observer is None:
                observer = await self._engine.open_connection()
                self._observers += 1
            async with contextlib.AsyncExitStack() as undo:
                undo.push_async_callback(observer.invalidate)
                driver = await observer.driver_connection()
                # One visit to the connection's thread; a transaction of SQLAlchemy's makes eight.
                ((number,),) = await driver.execute_fetchall("PRAGMA data_version")
                undo.pop_all()
            self._observer = observer
            return self._observers, int(number)

    def _check(self) -> None:
        if not self._migrated:
            raise DatabaseUnavailable("the database has not been reached yet")

    @contextlib.asynccontextmanager
    async def _translated(self, deadline_s: float) -> AsyncIterator[None]:
        """The seam where foreign errors become ours."""
        try:
            async with deadline(asyncio.get_running_loop().time() + deadline_s):
                yield
        except TimeoutError:
            told = f"the database does not answer: nothing within {deadline_s:g} s"
            raise DatabaseUnavailable(told) from None
        except NewerTables as error:
            raise NewerDatabase(str(error)) from None
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            reason: object = error
            if isinstance(error, DBAPIError):
                reason = error.orig  # without the statement and its parameters
            words = str(reason).partition("\n")[0] or type(reason).__name__
            if refuses(error):
                raise Refused(f"the database refuses it: {words}") from None
            raise DatabaseUnavailable(f"the database does not answer: {words}") from None


def refuses(error: Exception) -> bool:
    """Return whether an error is about the values of a statement, and lasts as long as they do.

    PostgreSQL's classes 22 (data exception) and 23 (integrity constraint violation); asyncpg's
    errors of class 22 have no class of their own in SQLAlchemy.
    """
    state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
    return isinstance(error, IntegrityError | DataError) or state[:2] in ("22", "23")


def _engine(url: str, deadline_s: float) -> AsyncEngine:
    options: dict[str, Any] = {}
    if url.startswith("postgresql"):
        options = {
            "pool_size": 5,
            "max_overflow": 5,
            "pool_timeout": deadline_s,
            "pool_pre_ping": True,  # a connection may have died with its server
            "connect_args": {
                "timeout": deadline_s,
                "command_timeout": MIGRATION_DEADLINE_S,
                # A gateway that vanished must not hold rows that the others want.
                "server_settings": {"idle_in_transaction_session_timeout": "10s"},
            },
        }
    # hide_parameters: an error must not show a digest.
    engine = create_async_engine(url, hide_parameters=True, **options)
    if engine.dialect.name == "sqlite":
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: object) -> None:
    # SQLAlchemy's documented recipe: the driver must not begin transactions by itself.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        # A killed process loses nothing; a power cut may lose the last commits, not the file.
        "synchronous=NORMAL",
        "busy_timeout=1500",
        "foreign_keys=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Any) -> None:
    # A transaction that reads and then writes must not find that another wrote in between.
    writing = connection.get_execution_options().get("writing")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")
