"""The tables on both databases: made, kept in step with the schema, unreachable."""

import asyncio
import contextlib
import os
import sqlite3
import stat
import threading
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, insert, select, text, update
from sqlalchemy.ext.asyncio import create_async_engine

from app.auth import KeyStore
from app.database import (
    Database,
    DatabaseBusy,
    DatabaseLocked,
    DatabaseUnavailable,
    Lane,
    NewerDatabase,
)
from app.database.migrate import HEAD, configuration
from app.database.schema import budget_alerts, metadata, revision, usage_records
from app.server.database import prepare_database
from app.settings import ConfigError
from app.usage import usage_report
from tests.gateway import free_port, make_tables, remote, settings_for
from tests.services import PostgresServer
from tests.waiting import PATIENCE_S, wait_until

# Far above what anything takes here, however busy the machine is.


_RECORD = (
    "id, at_ms, request_id, key_id, model, engine, endpoint, status, outcome, prompt_tokens,"
    " cached_tokens, completion_tokens, reasoning_tokens, estimated, total_ms, cost_nano"
)
_VALUES = "1, 'r', 'k', 'demo', 'e', '/', 200, 'completed', 1, 0, 1, 0, false, 1, 0"
RECORD_OF_VERSION_0002 = f"INSERT INTO usage_records ({_RECORD}) VALUES ('h', {_VALUES})"
KEY_OF_THE_PREVIOUS_VERSION = (
    "INSERT INTO api_keys (id, name, owner, role, digest, models, priority, weight, disabled,"
    " created_ms, revision)"
    " VALUES ('0000000001', 'a', '', 'client', NULL, '[\"*\"]', 0, 1, false, 1, 1)"
)
RECORD_OF_THE_PREVIOUS_VERSION = (
    f"INSERT INTO usage_records ({_RECORD}, owner) VALUES ('i', {_VALUES}, 'research')"
)


@pytest.fixture
async def database(tables_url: str) -> AsyncIterator[Database]:
    """A database with its tables, not opened."""
    database = Database(tables_url)
    yield database
    await database.close()


@pytest.fixture
async def empty_database(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    yield database
    await database.close()


def sqlite_url(directory: Path) -> str:
    """Return the URL of a new SQLite database with its tables."""
    file = directory / "gateway.db"
    make_tables(file)
    return f"sqlite+aiosqlite:///{file}"


# Alembic compares no index on an expression in SQLite, where there is none.
@pytest.mark.filterwarnings("ignore:autogenerate skipping metadata-specified expression")
async def test_migrations_create_the_tables_of_the_schema(empty_database: Database) -> None:
    database = empty_database
    await database.migrate()

    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    async with database.read() as connection:
        assert await connection.run_sync(differences) == []


def test_the_head_is_the_newest_migration() -> None:
    assert ScriptDirectory.from_config(configuration()).get_current_head() == HEAD


async def test_gateways_that_start_together_migrate_once(database_url: str) -> None:
    several = [Database(database_url) for _ in range(4)]
    try:
        await asyncio.gather(*(one.migrate() for one in several))
        async with several[0].read() as connection:
            assert (await connection.execute(text("SELECT value FROM revision"))).all() == [(0,)]
    finally:
        await asyncio.gather(*(one.close() for one in several))


async def test_migration_keeps_keys_of_the_previous_version(database_url: str) -> None:
    engine = create_async_engine(database_url)

    def before(connection: Connection) -> None:
        config = configuration()
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")

    async with engine.begin() as connection:
        await connection.run_sync(before)
        await connection.execute(text(KEY_OF_THE_PREVIOUS_VERSION))
    await engine.dispose()
    database = Database(database_url)
    await database.migrate()
    key = await KeyStore(database).get("0000000001")
    assert (key.name, key.models, key.fields) == ("a", ("*",), None)
    assert not key.may_load_models
    await database.close()


async def test_migration_assigns_previous_usage_to_the_owners_of_its_keys(
    database_url: str,
) -> None:
    engine = create_async_engine(database_url)
    today = datetime.now(UTC).date()
    async with engine.begin() as connection:
        await connection.run_sync(_upgrade_to_0002)
        for key_id, owner in (("0000000001", "research"), ("0000000002", "")):
            await connection.execute(
                text(
                    "INSERT INTO api_keys (id, name, owner, role, models, priority, weight,"
                    " disabled, created_ms, deleted_ms, revision) VALUES"
                    f" ('{key_id}', 'a', '{owner}', 'client', '[]', 0, 1, false, 1, 2, 1)"
                )
            )
            for day in (date(2026, 1, 1), today - timedelta(1), today):
                await connection.execute(
                    text(
                        "INSERT INTO usage_daily VALUES"
                        f" ('{day}', '{key_id}', 'demo', 2, 1, 100, 10, 50, 5, 7)"
                    )
                )
    await engine.dispose()
    database = Database(database_url)
    await database.migrate()
    rows = await usage_report(database, {"owner", "key"}, date(2026, 1, 1), today)
    assert [(row.owner, row.key_id, row.requests, row.prompt_tokens) for row in rows] == [
        ("", "0000000002", 6, 300),
        ("research", "0000000001", 6, 300),
    ]
    await database.close()


async def test_migration_keeps_usage_records_of_the_previous_version(database_url: str) -> None:
    engine = create_async_engine(database_url)

    def before(connection: Connection) -> None:
        config = configuration()
        config.attributes["connection"] = connection
        command.upgrade(config, "0003")

    async with engine.begin() as connection:
        await connection.run_sync(before)
        await connection.execute(text(RECORD_OF_THE_PREVIOUS_VERSION))
    await engine.dispose()
    database = Database(database_url)
    await database.migrate()
    async with database.read() as reading:
        (row,) = (await reading.execute(select(usage_records))).all()
    assert (row.id, row.owner) == ("i", "research")
    assert (row.continued, row.recomputed_tokens, row.not_continued) == (None, None, None)
    await database.close()


async def test_migration_keeps_alerts_and_tells_budgets_in_money_apart(database_url: str) -> None:
    engine = create_async_engine(database_url)

    def before(connection: Connection) -> None:
        config = configuration()
        config.attributes["connection"] = connection
        command.upgrade(config, "0005")

    alert = (
        "INSERT INTO budget_alerts (subject, name, period, day, budget, permille, id, used, at_ms, "
        "attempts, due_ms) VALUES ('key', 'k', 'day', '2026-11-21', 5, 800, 'i', 4, 1, 0, 1)"
    )
    async with engine.begin() as connection:
        await connection.run_sync(before)
        await connection.execute(text(alert))
    await engine.dispose()
    database = Database(database_url)
    await database.migrate()
    async with database.write() as writing:
        (row,) = (await writing.execute(select(budget_alerts))).all()
        assert (row.id, row.budget, row.measure) == ("i", 5, "tokens")
        await writing.execute(
            insert(budget_alerts).values({**row._mapping, "measure": "cost", "id": "j"})
        )
    await database.close()


def _upgrade_to_0002(connection: Connection) -> None:
    config = configuration()
    config.attributes["connection"] = connection
    command.upgrade(config, "0002")


@pytest.mark.services
@pytest.mark.slow
async def test_migration_waiting_for_a_reader_does_not_block_running_gateways(
    postgres_server: PostgresServer,
) -> None:
    """In PostgreSQL's lock queue, statements behind an ALTER TABLE wait for it."""
    url = postgres_server.emptied()
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(_upgrade_to_0002)
    newest = text("SELECT id FROM usage_records ORDER BY id DESC LIMIT 1")
    database = Database(url)
    async with engine.begin() as dump:
        await dump.execute(newest)
        opening = asyncio.create_task(database.open())
        for _ in range(20):
            async with asyncio.timeout(PATIENCE_S), engine.begin() as connection:
                await connection.execute(newest)
            await asyncio.sleep(0.1)
        await opening
        with pytest.raises(DatabaseUnavailable):
            async with database.read():
                pass
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                async with database.read() as reading:
                    await reading.execute(text("SELECT owner FROM usage_records"))
                break
            await asyncio.sleep(0.1)
    await database.close()
    await engine.dispose()


async def test_gateway_of_the_previous_version_keeps_writing_during_an_upgrade(
    database: Database,
) -> None:
    """Its statements, after a newer gateway has changed the tables."""
    await database.migrate()
    async with database.write() as connection:
        for _ in range(2):
            await connection.execute(
                text(
                    "INSERT INTO usage_daily (day, key_id, model, requests, estimated_requests,"
                    " prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens, cost_nano)"
                    " VALUES ('2026-11-20', 'k', 'demo', 1, 0, 10, 0, 5, 0, 7)"
                    " ON CONFLICT (day, key_id, model)"
                    " DO UPDATE SET requests = usage_daily.requests + excluded.requests"
                )
            )
        await connection.execute(text(RECORD_OF_THE_PREVIOUS_VERSION))
        await connection.execute(text(RECORD_OF_VERSION_0002))
        await connection.execute(text(KEY_OF_THE_PREVIOUS_VERSION))
    assert not (await KeyStore(database).get("0000000001")).may_load_models
    (row,) = await usage_report(database, {"owner"}, date(2026, 11, 1), date(2026, 11, 30))
    assert (row.owner, row.requests) == ("", 2)


async def test_migration_waits_for_another_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.database.database.BUSY_TIMEOUT_MS", 1)
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("BEGIN IMMEDIATE")
        database = Database(f"sqlite+aiosqlite:///{tmp_path}/a.db")
        migrating = asyncio.create_task(database.migrate())
        await asyncio.wait({migrating}, timeout=0.2)
        writer.execute("COMMIT")
        await migrating
        await database.close()


class TestTransact:
    async def test_commits_and_returns_the_result(self, database: Database) -> None:
        await database.migrate()

        def bump(connection: Connection) -> int:
            connection.execute(update(revision).values(value=revision.c.value + 1))
            return int(connection.scalar(select(revision.c.value)) or 0)

        numbers = [await database.transact(bump, Lane.BACKGROUND) for _ in range(2)]
        assert numbers[1] == numbers[0] + 1
        ((stored,),) = await database.fetch(select(revision.c.value))
        assert stored == numbers[1]

    async def test_an_exception_rolls_back(self, database: Database) -> None:
        await database.migrate()
        ((before,),) = await database.fetch(select(revision.c.value))

        def fail(connection: Connection) -> None:
            connection.execute(update(revision).values(value=12345))
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await database.transact(fail, Lane.BACKGROUND)
        ((after,),) = await database.fetch(select(revision.c.value))
        assert after == before

    async def test_on_sqlite_a_query_does_not_wait_for_a_writer(self, tmp_path: Path) -> None:
        database = Database(sqlite_url(tmp_path))
        await database.migrate()
        written, go_on = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def write(connection: Connection) -> None:
            connection.execute(update(revision).values(value=revision.c.value + 1))
            loop.call_soon_threadsafe(written.set)
            go_on.wait()

        writing = asyncio.create_task(database.transact(write, Lane.BACKGROUND))
        await written.wait()
        try:
            ((before,),) = await database.fetch(select(revision.c.value))
        finally:
            go_on.set()
        await writing
        ((after,),) = await database.fetch(select(revision.c.value))
        assert after == before + 1
        await database.close()

    async def test_on_sqlite_a_canceled_one_is_rolled_back(self, tmp_path: Path) -> None:
        """Else the ledger would write, in the end, what it has reported as lost."""
        database = Database(sqlite_url(tmp_path))
        await database.migrate()
        written, go_on = threading.Event(), threading.Event()

        def read(connection: Connection) -> int:
            return int(connection.scalar(select(revision.c.value)) or 0)

        def write(connection: Connection) -> None:
            connection.execute(update(revision).values(value=revision.c.value + 1))
            written.set()
            go_on.wait()

        before = await database.transact(read, Lane.BACKGROUND)
        writing = asyncio.create_task(database.transact(write, Lane.BACKGROUND))
        await asyncio.to_thread(written.wait)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        go_on.set()
        assert await database.transact(read, Lane.BACKGROUND) == before
        await database.close()


class TestNewerGateway:
    @pytest.fixture
    async def newer(self, database_url: str) -> str:
        """The URL of a database that a newer gateway has migrated."""
        database = Database(database_url)
        await database.migrate()
        async with database.write() as connection:
            await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        await database.close()
        return database_url

    async def test_older_gateway_leaves_the_tables_alone_and_advises(self, newer: str) -> None:
        database = Database(newer)
        with pytest.raises(NewerDatabase, match=r"those of a newer gateway .* restore the backup"):
            await database.migrate()
        with pytest.raises(DatabaseUnavailable):
            async with database.read():
                pass
        await database.close()

    async def test_older_gateway_does_not_start(self, newer: str, tmp_path: Path) -> None:
        model = {"name": "demo", "engines": [remote("http://127.0.0.1:9")]}
        settings = settings_for(model, run_dir=tmp_path, state={"database_url": newer})
        with pytest.raises(ConfigError) as caught:
            await asyncio.to_thread(prepare_database, settings)
        [fault] = caught.value.faults
        assert "those of a newer gateway (revision 9999, this one has " in fault
        assert fault == fault.splitlines()[0]

    async def test_gateway_reports_a_newer_database_that_starts_later(
        self, newer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("app.database.database.RETRY_S", 0.01)
        real, tries = Database.migrate, 0

        async def migrate(self: Database) -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise DatabaseUnavailable("the database does not answer")
            await real(self)

        monkeypatch.setattr(Database, "migrate", migrate)
        database = Database(newer)
        await database.open()
        await wait_until(lambda: tries >= 4)
        await database.close()
        messages = [one.message for one in caplog.records if "newer gateway" in one.message]
        assert len(messages) == 1


async def test_a_transaction_that_raises_changes_nothing(database: Database) -> None:
    await database.migrate()
    with contextlib.suppress(ZeroDivisionError):
        async with database.write() as connection:
            await connection.execute(text("UPDATE revision SET value = 7"))
            raise ZeroDivisionError
    async with database.read() as connection:
        assert (await connection.execute(text("SELECT value FROM revision"))).scalar() == 0


async def test_data_version_is_stable_until_a_commit(database: Database, tables_url: str) -> None:
    await database.migrate()
    before = await database.version()
    if database.dialect == "postgresql":
        assert before is None
        return
    async with database.read() as connection:
        await connection.execute(text("SELECT value FROM revision"))
    assert await database.version() == before
    other = Database(tables_url)  # the command line, say
    await other.migrate()
    for writer in (database, other):
        async with writer.write() as connection:
            await connection.execute(text("UPDATE revision SET value = value + 1"))
            assert await database.version() == before
        after = await database.version()
        assert after != before
        before = after
    await other.close()


async def test_data_version_never_repeats_across_an_error(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path))
    await database.migrate()
    before = await database.version()
    assert database._observer is not None
    driver: Any = database._observer.connection.driver_connection
    driver.close()
    with pytest.raises(DatabaseUnavailable, match="closed database"):
        await database.version()
    assert await database.version() not in (before, None)
    await database.close()


async def test_in_memory_database_has_no_data_version() -> None:
    database = Database("sqlite+aiosqlite:///:memory:")
    await database.migrate()
    assert await database.version() is None
    await database.close()


async def test_error_text_omits_statement_and_values(database: Database) -> None:
    await database.migrate()
    with pytest.raises(DatabaseUnavailable) as caught:
        async with database.read() as connection:
            await connection.execute(text("SELECT * FROM nowhere WHERE a = :a"), {"a": "canary"})
    assert "canary" not in str(caught.value)
    assert "SELECT" not in str(caught.value)


async def test_use_before_the_migration_is_refused(database: Database) -> None:
    with pytest.raises(DatabaseUnavailable):
        async with database.read():
            pass


async def test_unreachable_database_is_unavailable_and_its_password_hidden() -> None:
    database = Database(f"postgresql+asyncpg://me:canary@127.0.0.1:{free_port()}/gateway")
    with pytest.raises(DatabaseUnavailable) as caught:
        await database.migrate()
    assert "canary" not in f"{caught.value}{database!r}"
    await database.close()


async def test_file_that_cannot_be_created_is_unavailable() -> None:
    database = Database("sqlite+aiosqlite:////proc/nowhere/gateway.db")
    with pytest.raises(DatabaseUnavailable, match="/proc/nowhere"):
        await database.migrate()
    await database.close()


async def test_directory_as_database_file_is_unavailable(tmp_path: Path) -> None:
    before = threading.active_count()
    database = Database(f"sqlite+aiosqlite:///{tmp_path}")
    with pytest.raises(DatabaseUnavailable, match=f"{tmp_path}: unable to open"):
        await database.migrate()
    assert threading.active_count() == before


async def test_abandoned_connection_is_closed_with_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its thread would speak to a loop that may have ended."""
    database = Database(sqlite_url(tmp_path), deadline_s=PATIENCE_S)
    await database.migrate()
    before = threading.active_count()
    asked, may_open = threading.Event(), threading.Event()
    connect = sqlite3.connect

    def connect_late(*arguments: Any, **options: Any) -> sqlite3.Connection:
        asked.set()
        may_open.wait(PATIENCE_S)
        connection: sqlite3.Connection = connect(*arguments, **options)
        return connection

    async def read() -> None:
        async with database.read():
            pytest.fail("it was cancelled before")

    async with database.read():  # with the pool's only connection
        monkeypatch.setattr("aiosqlite.core.sqlite3.connect", connect_late)
        reading = asyncio.create_task(read())
        await asyncio.to_thread(asked.wait, PATIENCE_S)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
    closing = asyncio.create_task(database.close())
    done, _ = await asyncio.wait({closing}, timeout=0.1)
    may_open.set()
    await closing
    assert not done
    assert threading.active_count() <= before
    await database.close()


async def test_cancellation_is_raised_once_the_connection_is_back_in_the_pool(
    tmp_path: Path,
) -> None:
    """Else a connection could return to a pool that is closed already."""
    database = Database(sqlite_url(tmp_path), deadline_s=PATIENCE_S)
    await database.migrate()
    used, may_go_on = asyncio.Event(), threading.Event()

    async def use() -> None:
        async with database.read() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            # Its thread is busy, so the rollback at the end of the block waits.
            busy = asyncio.create_task(driver._execute(may_go_on.wait))
            await asyncio.sleep(0)
            used.set()
        await busy

    using = asyncio.create_task(use())
    await used.wait()
    try:
        for _ in range(3):
            using.cancel()
            await asyncio.sleep(0.01)
            assert not using.done()
    finally:
        may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await using
    await database.close()


async def test_close_that_a_slow_write_outlasts_ends_every_pooled_connection(
    tmp_path: Path,
) -> None:
    database = Database(sqlite_url(tmp_path))
    await database.migrate()
    async with database.read(Lane.REQUESTS), database.read(Lane.REQUESTS):
        pass
    database._deadline_s = 0.05
    begun, may_end = threading.Event(), threading.Event()

    def write_slowly(_: Connection) -> None:
        begun.set()
        may_end.wait(PATIENCE_S)

    await database.version()  # its connection is kept
    writing = asyncio.create_task(database.transact(write_slowly, Lane.BACKGROUND))
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    writing.cancel()
    await database.close()
    alive = [thread for thread in database._threads if thread.is_alive()]
    observer = database._observer
    may_end.set()
    assert not alive
    assert observer is not None
    assert observer.closed


async def test_interrupted_close_ends_every_pooled_connection(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path))
    await database.migrate()
    async with contextlib.AsyncExitStack() as block:
        reading = (database.read(Lane.REQUESTS) for _ in range(3))
        connections = [await block.enter_async_context(one) for one in reading]
        raw = [await connection.get_raw_connection() for connection in connections]
        drivers: list[Any] = [connection.driver_connection for connection in raw]
    may_go_on = threading.Event()
    busy = asyncio.create_task(drivers[0]._execute(may_go_on.wait))
    asyncio.get_running_loop().call_later(0.05, may_go_on.set)
    await asyncio.sleep(0)
    database._deadline_s = 0.01  # of its close alone
    await database.close()
    await busy
    for driver in drivers:
        with pytest.raises(ValueError, match=r"closed|no active connection"):
            await driver.execute("SELECT 1")
    await wait_until(lambda: not any(driver._thread.is_alive() for driver in drivers))


async def test_file_that_another_program_holds_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's own wait is longer than the deadline, after which nothing is known."""
    monkeypatch.setattr("app.database.database.BUSY_TIMEOUT_MS", 50)
    with contextlib.closing(
        sqlite3.connect(tmp_path / "gateway.db", isolation_level=None)
    ) as other:
        other.execute("BEGIN EXCLUSIVE")
        database = Database(sqlite_url(tmp_path))
        with pytest.raises(DatabaseLocked):
            await database.migrate()
        await database.close()


async def test_file_of_another_format_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "gateway.db").write_bytes(b"not a database" * 100)
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/gateway.db")
    with pytest.raises(DatabaseUnavailable, match="not a database"):
        await database.migrate()
    await database.close()


@pytest.mark.services
@pytest.mark.slow
class TestFileMode:
    """The file has digests of keys and who used how much of what."""

    @pytest.fixture(autouse=True)
    def _open_to_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.chdir(tmp_path)
        before = os.umask(0)
        yield
        os.umask(before)

    async def modes(self, url: str, directory: Path) -> dict[str, int]:
        """Return the modes of the files of a database while it is in use."""
        database = Database(url)
        try:
            await database.migrate()
            async with database.write() as connection:
                await connection.execute(text("UPDATE revision SET value = 1"))
                files = sorted(directory.glob("gateway.db*"))
                return {file.name: stat.S_IMODE(file.stat().st_mode) for file in files}
        finally:
            await database.close()

    @pytest.mark.parametrize(
        ("place", "directory"),
        [("gateway.db", "."), ("a/b/gateway.db", "a/b"), ("{}/gateway.db", ".")],
    )
    async def test_new_file_and_its_companions_have_mode_0600(
        self, tmp_path: Path, place: str, directory: str
    ) -> None:
        url = f"sqlite+aiosqlite:///{place.format(tmp_path)}"
        found = await self.modes(url, tmp_path / directory)
        assert found == {"gateway.db": 0o600, "gateway.db-shm": 0o600, "gateway.db-wal": 0o600}

    async def test_file_is_private_before_sqlite_opens_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []
        connect = sqlite3.connect

        def watched(file: str, *arguments: Any, **options: Any) -> sqlite3.Connection:
            seen.append(stat.S_IMODE(os.stat(file).st_mode))
            connection: sqlite3.Connection = connect(file, *arguments, **options)
            return connection

        monkeypatch.setattr(sqlite3, "connect", watched)
        await self.modes(f"sqlite+aiosqlite:///{tmp_path}/gateway.db", tmp_path)
        assert set(seen) == {0o600}

    async def test_existing_file_gets_mode_0600(self, tmp_path: Path) -> None:
        url = f"sqlite+aiosqlite:///{tmp_path}/gateway.db"
        database = Database(url)
        await database.migrate()
        for file in tmp_path.glob("gateway.db*"):
            file.chmod(0o644)
        found = await self.modes(url, tmp_path)
        await database.close()
        assert set(found.values()) == {0o600}
        assert len(found) == 3

    async def test_symlink_to_a_missing_file_creates_it_private(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "gateway.db").symlink_to(tmp_path / "disk" / "gateway.db")
        found = await self.modes("sqlite+aiosqlite:///gateway.db", tmp_path / "disk")
        assert set(found.values()) == {0o600}

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
    async def test_file_of_another_user_is_left_alone_and_reported(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "gateway.db"
        file.touch(mode=0o644)
        os.chown(file, 12_345, 12_345)
        await self.modes("sqlite+aiosqlite:///gateway.db", tmp_path)
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
        [message] = [one.getMessage() for one in caplog.records if "mode 0600" in one.msg]
        assert message == f"database file {file} is open to other users; give it mode 0600"

    async def test_in_memory_database_creates_no_file(self, tmp_path: Path) -> None:
        database = Database("sqlite+aiosqlite:///:memory:")
        await database.migrate()
        await database.close()
        assert list(tmp_path.iterdir()) == []


class TestPostgres:
    @pytest.fixture
    def server(self) -> PostgresServer:
        return PostgresServer()

    async def test_a_server_that_hangs_costs_the_deadline(self, server: PostgresServer) -> None:
        try:
            await asyncio.to_thread(server.start)
            database = Database(server.url("postgres"), deadline_s=0.5)
            await database.migrate()
            server.pause()
            with pytest.raises(DatabaseUnavailable):
                async with database.read() as connection:
                    await connection.execute(text("SELECT 1"))
            server.resume()
            async with database.read() as connection:
                await connection.execute(text("SELECT 1"))
            await database.close()
        finally:
            await asyncio.to_thread(server.remove)

    async def test_server_that_starts_later_is_found(self, server: PostgresServer) -> None:
        database = Database(server.url("postgres"))
        try:
            await database.open()
            await asyncio.to_thread(server.start)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                try:
                    async with database.read() as connection:
                        await connection.execute(text("SELECT 1"))
                    break
                except DatabaseUnavailable:
                    await asyncio.sleep(0.1)
            else:
                pytest.fail("the database was not found")
        finally:
            await database.close()
            await asyncio.to_thread(server.remove)


class TestLanes:
    """Connections are kept for what requests wait for, whatever pages read."""

    async def test_requests_read_while_pages_and_reports_wait(self, database: Database) -> None:
        await database.migrate()
        async with contextlib.AsyncExitStack() as block:
            for lane in (Lane.PAGES, Lane.PAGES, Lane.REPORTS, Lane.REPORTS):
                await block.enter_async_context(database.read(lane))
            waiting = [asyncio.create_task(used(database, Lane.REPORTS)) for _ in range(50)]
            for _ in range(20):
                await used(database, Lane.REQUESTS)
            with pytest.raises(DatabaseBusy, match="too many requests wait"):
                await asyncio.gather(*waiting)
        await asyncio.gather(*(used(database, lane) for lane in Lane for _ in range(20)))

    async def test_every_lane_is_used_at_once(self, database: Database) -> None:
        await database.migrate()
        await database.version()
        async with contextlib.AsyncExitStack() as block:
            for lane in Lane:
                for _ in range(lane.value[0]):
                    await block.enter_async_context(database.read(lane))

    async def test_canceled_openings_leave_nothing_behind(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each would be a thread and descriptors beside the pool."""
        database = Database(sqlite_url(tmp_path))
        await database.migrate()
        may_open = threading.Event()
        connect = sqlite3.connect

        def connect_late(*arguments: Any, **options: Any) -> sqlite3.Connection:
            may_open.wait(PATIENCE_S)
            connection: sqlite3.Connection = connect(*arguments, **options)
            return connection

        async with database.read():  # with the pool's only connection
            monkeypatch.setattr("aiosqlite.core.sqlite3.connect", connect_late)
            database._deadline_s = 0.05
            for _ in range(Lane.REQUESTS.value[0]):
                with pytest.raises(DatabaseUnavailable, match="nothing within"):
                    await used(database, Lane.REQUESTS)
            opened = threading.active_count()
            database._deadline_s = PATIENCE_S
            again = [asyncio.create_task(used(database, Lane.REQUESTS)) for _ in range(30)]
            await asyncio.sleep(0.2)
            assert threading.active_count() == opened, "they wait before the pool"
            may_open.set()
            await asyncio.gather(*again)
        await used(database, Lane.REQUESTS)
        await database.close()
        assert not database._abandoned

    async def test_lane_whose_connections_do_not_open_is_an_outage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        database = Database(f"sqlite+aiosqlite:///{tmp_path}/gateway.db")
        await database.migrate()
        may_open = threading.Event()
        connect = sqlite3.connect
        monkeypatch.setattr(
            "aiosqlite.core.sqlite3.connect",
            lambda *given, **options: may_open.wait(PATIENCE_S) and connect(*given, **options),
        )
        async with database.read():
            database._deadline_s = 0.05
            for _ in range(Lane.REPORTS.value[0]):
                with pytest.raises(DatabaseUnavailable, match="nothing within"):
                    await used(database, Lane.REPORTS)
            with pytest.raises(DatabaseUnavailable, match="opens no connection"):
                await used(database, Lane.REPORTS)
            may_open.set()
        database._deadline_s = PATIENCE_S
        await database.close()


async def used(database: Database, lane: Lane) -> None:
    async with database.read(lane) as connection:
        await connection.execute(text("SELECT value FROM revision"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fetch", "read"])
async def test_busy_event_loop_is_no_outage(tmp_path: Path, kind: str) -> None:
    """Each turn of the loop takes as long as the work of all connections that are ready."""
    database = Database(sqlite_url(tmp_path), deadline_s=1.0)
    await database.migrate()
    loop, turn_s, busy = asyncio.get_running_loop(), 0.7 if kind == "fetch" else 0.13, True

    def work() -> None:
        until = time.monotonic() + turn_s
        while time.monotonic() < until:
            pass
        if busy:
            loop.call_soon(work)

    work()
    began = loop.time()
    try:
        if kind == "read":
            await used(database, Lane.REQUESTS)
        else:
            await database.fetch(select(revision.c.value))
    finally:
        busy = False
    assert loop.time() - began > 1.0, "longer than the deadline"
    await database.close()
