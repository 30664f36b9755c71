"""The tables on both databases: made, kept in step with the schema, unreachable."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from app.database.database import Database, DatabaseUnavailable
from app.database.migrate import HEAD, configuration
from app.database.schema import metadata
from tests.gateway import free_port
from tests.services import PostgresServer


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    yield database
    await database.close()


async def test_the_migrations_make_the_tables_of_the_schema(database: Database) -> None:
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


async def test_a_transaction_that_raises_changes_nothing(database: Database) -> None:
    await database.migrate()
    with contextlib.suppress(ZeroDivisionError):
        async with database.write() as connection:
            await connection.execute(text("UPDATE revision SET value = 7"))
            raise ZeroDivisionError
    async with database.read() as connection:
        assert (await connection.execute(text("SELECT value FROM revision"))).scalar() == 0


async def test_a_fault_shows_no_statement_and_no_value(database: Database) -> None:
    await database.migrate()
    with pytest.raises(DatabaseUnavailable) as caught:
        async with database.read() as connection:
            await connection.execute(text("SELECT * FROM nowhere WHERE a = :a"), {"a": "canary"})
    assert "canary" not in str(caught.value)
    assert "SELECT" not in str(caught.value)


async def test_before_the_tables_are_there_every_use_is_refused(database: Database) -> None:
    with pytest.raises(DatabaseUnavailable):
        async with database.read():
            pass


async def test_a_database_nobody_serves_is_unavailable_and_its_password_unseen() -> None:
    database = Database(f"postgresql+asyncpg://me:canary@127.0.0.1:{free_port()}/gateway")
    with pytest.raises(DatabaseUnavailable) as caught:
        await database.migrate()
    assert "canary" not in f"{caught.value}{database!r}"
    await database.close()


async def test_a_file_that_cannot_be_made_is_unavailable() -> None:
    database = Database("sqlite+aiosqlite:////proc/nowhere/gateway.db")
    with pytest.raises(DatabaseUnavailable, match="/proc/nowhere"):
        await database.migrate()
    await database.close()


async def test_a_directory_is_no_file(tmp_path: Path) -> None:
    before = threading.active_count()
    database = Database(f"sqlite+aiosqlite:///{tmp_path}")
    with pytest.raises(DatabaseUnavailable, match=f"{tmp_path}: unable to open"):
        await database.migrate()
    assert threading.active_count() == before
    await database.close()


async def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "gateway.db").write_bytes(b"not a database" * 100)
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/gateway.db")
    with pytest.raises(DatabaseUnavailable, match="not a database"):
        await database.migrate()
    await database.close()


@pytest.mark.services
@pytest.mark.slow
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

    async def test_a_server_that_comes_later_is_found(self, server: PostgresServer) -> None:
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
