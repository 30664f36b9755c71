"""Migrations in a child process: tables, error texts, and secrets."""

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from app.database import Database, DatabaseUnavailable, NewerDatabase
from app.database.backup import damage_after_unclean_end
from app.database.migrate import HEAD
from app.database.migration_process import migrate_in_child
from app.server.database import other_database, prepare_database
from app.settings import ConfigError, Settings
from tests.gateway import free_port, make_tables, remote, settings_for

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
        assert prepare_database(settings)
    finally:
        os.umask(before)
    assert not prepare_database(settings)
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
        prepare_database(settings)
    migrate(url_of(file))
    prepare_database(settings)


def test_tables_of_a_newer_gateway_are_left_alone(settings: Settings, file: Path) -> None:
    migrate(url_of(file))
    make_newer(file)
    with pytest.raises(NewerDatabase) as here:
        migrate(url_of(file))
    with pytest.raises(NewerDatabase) as there:
        migrate_in_child(url_of(file))
    with pytest.raises(ConfigError) as caught:
        prepare_database(settings)
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


def add_key(connection: sqlite3.Connection) -> None:
    columns = "id, name, owner, role, models, priority, weight, disabled, created_ms, revision"
    values = "'a', 'a', 'a', 'client', '[]', 0, 1, 0, 1, 1"
    connection.execute(f"INSERT INTO api_keys ({columns}) VALUES ({values})")


def test_a_new_database_beside_one_with_keys_is_said(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert other_database(settings) is None
    forgotten = tmp_path / "var" / "gateway.db"
    forgotten.parent.mkdir()
    make_tables(forgotten)
    assert other_database(settings) is None
    with sqlite3.connect(forgotten) as connection:
        add_key(connection)
    assert other_database(settings) == (
        f"the database is new and has no keys, but {forgotten} has 1: to use that one, set "
        "state.database_url; to copy it, stop the gateway: vllm-gateway db copy"
    )


def test_a_key_made_at_once_is_not_in_another_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "var" / "gateway.db"
    own.parent.mkdir()
    make_tables(own)
    with sqlite3.connect(own) as connection:
        add_key(connection)
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:9")]}
    state = {"database_url": url_of(Path("var/gateway.db"))}
    assert other_database(settings_for(model, run_dir=tmp_path / "run", state=state)) is None


FILL = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA journal_mode=WAL")
connection.execute("CREATE TABLE filler (text)")
connection.execute("CREATE INDEX filled ON filler (text)")
with connection:
    connection.executemany("INSERT INTO filler VALUES (?)", ((f"{i:0500}",) for i in range(2000)))
print(flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def test_a_database_is_checked_after_an_unclean_end(settings: Settings, file: Path) -> None:
    prepare_database(settings)
    subprocess.run([sys.executable, "-c", FILL, str(file), "now"], check=False)
    assert damage_after_unclean_end(file) is None
    assert not prepare_database(settings)

    subprocess.run(
        [
            sys.executable,
            "-c",
            FILL.replace("filler", "more").replace("filled", "mored"),
            str(file),
            "now",
        ],
        check=False,
    )
    with file.open("r+b") as damaged:
        damaged.seek(40 * 4096)
        damaged.write(b"\xff" * 40 * 4096)
    with pytest.raises(
        ConfigError, match=r"damaged: .*; restore a backup: vllm-gateway db restore"
    ):
        prepare_database(settings)


def test_a_database_that_others_use_is_not_checked(settings: Settings, file: Path) -> None:
    prepare_database(settings)
    with subprocess.Popen(
        [sys.executable, "-c", FILL, str(file), "wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as user:
        assert user.stdout is not None
        user.stdout.readline()
        with file.open("r+b") as damaged:
            damaged.seek(8 * 4096)
            damaged.write(b"\xff" * 4096)
        assert damage_after_unclean_end(file) is None
        user.kill()
