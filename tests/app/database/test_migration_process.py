"""Migrations in a child process: tables, error texts, and secrets."""

import asyncio
import os
import sqlite3
import stat
import sys
from pathlib import Path

import pytest

from app.database import Database, DatabaseUnavailable, NewerDatabase
from app.database.migrate import HEAD
from app.database.migration_process import migrate_in_child
from app.server.run import check_database
from app.settings import ConfigError, Settings
from tests.gateway import free_port, remote, settings_for

pytestmark = pytest.mark.slow


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gateway.db"


@pytest.fixture
def settings(tmp_path: Path, file: Path) -> Settings:
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:9")]}
    state = {"database_url": url_of(file)}
    return settings_for(model, run_dir=tmp_path / "run", state=state)


def url_of(file: Path) -> str:
    return f"sqlite+aiosqlite:///{file}"


def revision(file: Path) -> str:
    connection = sqlite3.connect(file)
    [(found,)] = connection.execute("SELECT version_num FROM alembic_version")
    connection.close()
    assert isinstance(found, str)
    return found


def make_newer(file: Path) -> None:
    connection = sqlite3.connect(file)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()


def migrate(url: str) -> None:
    """Migrate in this process."""

    async def run() -> None:
        database = Database(url)
        try:
            await database.migrate()
        finally:
            await database.close()

    asyncio.run(run())


@pytest.fixture
def not_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the place of the interpreter, which fails until it is written to."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return script


def test_new_file_gets_the_tables_and_is_private(settings: Settings, file: Path) -> None:
    before = os.umask(0)
    try:
        check_database(settings)
    finally:
        os.umask(before)
    assert revision(file) == HEAD
    assert {stat.S_IMODE(one.stat().st_mode) for one in file.parent.glob("gateway.db*")} == {0o600}


async def test_migration_creates_the_tables_in_either_database(database_url: str) -> None:
    await asyncio.to_thread(migrate_in_child, database_url)
    database = Database(database_url)
    assert await database.is_current()
    await database.close()


def test_current_tables_start_no_child_process(
    settings: Settings, file: Path, not_python: Path
) -> None:
    with pytest.raises(ConfigError, match="the migration failed with exit code 1"):
        check_database(settings)
    migrate(url_of(file))
    check_database(settings)


def test_tables_of_a_newer_gateway_are_left_alone(settings: Settings, file: Path) -> None:
    migrate(url_of(file))
    make_newer(file)
    with pytest.raises(NewerDatabase) as here:
        migrate(url_of(file))
    with pytest.raises(NewerDatabase) as there:
        migrate_in_child(url_of(file))
    with pytest.raises(ConfigError) as caught:
        check_database(settings)
    assert str(there.value) == str(here.value)
    assert caught.value.faults == [f"state.database_url <Database {url_of(file)}>: {here.value}"]
    assert revision(file) == "9999"


def test_error_text_is_the_same_as_in_process(file: Path) -> None:
    file.write_bytes(b"not a database" * 100)
    with pytest.raises(DatabaseUnavailable) as here:
        migrate(url_of(file))
    with pytest.raises(DatabaseUnavailable) as there:
        migrate_in_child(url_of(file))
    assert str(there.value) == str(here.value)
    assert "not a database" in str(there.value)


def test_error_text_omits_the_password() -> None:
    with pytest.raises(DatabaseUnavailable) as caught:
        migrate_in_child(f"postgresql+asyncpg://me:canary@127.0.0.1:{free_port()}/gateway")
    assert "the database does not answer" in str(caught.value)
    assert "canary" not in str(caught.value)


def test_url_is_neither_in_the_arguments_nor_in_the_environment(
    tmp_path: Path, not_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "postgresql+asyncpg://me:canary@127.0.0.1/gateway"
    monkeypatch.setenv("GATEWAY_STATE__DATABASE_URL", url)
    monkeypatch.setenv("PGSSLROOTCERT", "/etc/root.crt")
    not_python.write_text(f"#!/bin/sh\ncd {tmp_path}\necho $@ > argv\nenv > env\ncat > stdin\n")
    migrate_in_child(url)
    assert (tmp_path / "stdin").read_text() == url
    assert "canary" not in (tmp_path / "argv").read_text()
    assert "canary" not in (tmp_path / "env").read_text()
    assert "PGSSLROOTCERT=/etc/root.crt" in (tmp_path / "env").read_text()


def test_child_that_is_killed_is_a_fault(not_python: Path) -> None:
    not_python.write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(DatabaseUnavailable, match="the migration failed with exit code -9"):
        migrate_in_child("sqlite+aiosqlite://")


def test_child_that_cannot_be_started_is_a_fault(not_python: Path) -> None:
    not_python.unlink()
    with pytest.raises(DatabaseUnavailable, match="cannot start the migration: No such file"):
        migrate_in_child("sqlite+aiosqlite://")
