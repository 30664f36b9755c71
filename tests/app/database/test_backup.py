"""Backups made while somebody writes, and restores after whoever wrote was killed."""

import asyncio
import contextlib
import os
import random
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select, text

from app.database import Database, DatabaseError, DatabaseUnavailable
from app.database.backup import ABANDONED_S, back_up, check, copy, restore
from app.database.migrate import HEAD
from app.database.schema import api_keys, metadata, usage_records
from app.database.sqlite_backup import BackupFault, part_of
from tests.app.usage.records import opened
from tests.gateway import make_tables
from tests.services import PostgresServer
from tests.waiting import PATIENCE_S

# Commits a record at a time for ever, in the mode of the gateway, and says so once.
WRITER = textwrap.dedent("""
    import itertools, sqlite3, sys
    connection = sqlite3.connect(sys.argv[1], isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    for number in itertools.count():
        connection.execute(
            "INSERT INTO stored_responses VALUES (?, 'key', 'demo', 'demo-0', ?)",
            (f"{sys.argv[2]}-{number}", number),
        )
        if number == 20:
            print("writing", flush=True)
""")


def url_of(file: Path) -> str:
    return f"sqlite+aiosqlite:///{file}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database that nobody uses."""
    file = tmp_path / "state" / "gateway.db"
    make_tables(file)
    return file


def dump(file: Path) -> list[str]:
    """Return all that a database holds, read as any program would."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return list(connection.iterdump())


def writer(file: Path, name: str) -> subprocess.Popen[str]:
    """Start a process that writes, and wait until it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(file), name], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


@pytest.mark.slow
async def test_restores_after_a_kill_at_any_moment_have_every_row(
    file: Path, tmp_path: Path, show: Callable[[str], None]
) -> None:
    dice = random.Random(34)
    saved = []
    for drill in range(20):
        with writer(file, f"w{drill}") as process:
            time.sleep(dice.uniform(0, 0.05))
            backup = tmp_path / f"{drill}.db"
            counts = await back_up(url_of(file), backup)
            with pytest.raises(BackupFault, match="in use: stop the gateway"):
                await restore(backup, url_of(file))
            time.sleep(dice.uniform(0, 0.05))
            process.kill()
        assert Path(f"{file}-wal").stat().st_size, "the kill has left what the old file needs"
        kept, found = await restore(backup, url_of(file))
        assert found == counts
        assert dump(file) == dump(backup)
        assert kept is not None
        assert len(dump(kept)) > len(dump(backup)), "what came after the backup is kept aside"
        saved.append(counts["stored_responses"])
    assert saved == sorted(saved)
    show(f"20 of 20 restores equal their backups, of {saved[0]} to {saved[-1]} rows")


async def test_a_lost_file_is_not_restored_under_a_gateway_that_runs_on(
    file: Path, tmp_path: Path
) -> None:
    backup = tmp_path / "backup.db"
    with writer(file, "w") as process:
        await back_up(url_of(file), backup)
        file.unlink()
        try:
            with pytest.raises(BackupFault, match="in use: stop the gateway"):
                await restore(backup, url_of(file))
        finally:
            process.kill()
        assert not file.exists()
    await restore(backup, url_of(file))
    assert dump(file) == dump(backup)


async def test_a_copy_of_the_file_alone_lacks_what_was_committed(
    file: Path, tmp_path: Path
) -> None:
    """Why `cp` is no backup."""
    with writer(file, "w") as process:
        copied = tmp_path / "cp.db"
        copied.write_bytes(file.read_bytes())
        backup = tmp_path / "backup.db"
        counts = await back_up(url_of(file), backup)
        process.kill()
    assert counts["stored_responses"] > 20
    assert (await check(url_of(copied)))["stored_responses"] < counts["stored_responses"]


async def test_a_backup_is_one_private_file(file: Path, tmp_path: Path) -> None:
    directory = tmp_path / "backups"
    directory.mkdir()
    await back_up(url_of(file), directory / "one.db")
    assert [one.name for one in directory.iterdir()] == ["one.db"]
    assert (directory / "one.db").stat().st_mode & 0o777 == 0o600
    await check(url_of(directory / "one.db"))
    assert [one.name for one in directory.iterdir()] == ["one.db"], "a check changes nothing"


async def test_a_backup_overwrites_nothing(file: Path, tmp_path: Path) -> None:
    there = tmp_path / "there.db"
    there.write_text("precious")
    with pytest.raises(BackupFault, match=r"there\.db: exists already"):
        await back_up(url_of(file), there)
    assert there.read_text() == "precious"


async def test_what_a_killed_backup_left_goes_with_a_later_one(file: Path, tmp_path: Path) -> None:
    killed = part_of(tmp_path / "monday.db", "rows")
    left = [killed, Path(f"{killed}-wal"), part_of(tmp_path / "monday.db", "copy")]
    kept = [tmp_path / "of-another.rows", part_of(tmp_path / "under-way.db", "rows")]
    for one in (*left, *kept):
        one.touch()
    for one in (*left, kept[0]):
        os.utime(one, (time.time() - ABANDONED_S - 1,) * 2)
    await back_up(url_of(file), tmp_path / "tuesday.db")
    found = {one.name for one in tmp_path.iterdir() if one.is_file()}
    assert found == {"tuesday.db", *(one.name for one in kept)}


async def test_a_restore_where_there_is_no_database(file: Path, tmp_path: Path) -> None:
    """Leftovers of one that was removed are not applied to what is restored."""
    backup, elsewhere = tmp_path / "backup.db", tmp_path / "new" / "gateway.db"
    await back_up(url_of(file), backup)
    elsewhere.parent.mkdir()
    Path(f"{elsewhere}-wal").write_bytes(b"left over")
    kept, _ = await restore(backup, url_of(elsewhere))
    assert kept is None
    assert dump(elsewhere) == dump(backup)


def broken(file: Path, how: str) -> str:
    """Spoil a backup; return what is said of it."""
    if how == "damaged":
        data = bytearray(file.read_bytes())
        data[5000:9000] = bytes(4000)
        file.write_bytes(data)
        return "damaged: |malformed"
    if how == "cut short":
        file.write_bytes(file.read_bytes()[:9000])
        return "damaged: |malformed|disk I/O"
    if how == "no database":
        file.write_text("not a database" * 100)
        return "file is not a database"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        if how == "of another program":
            connection.execute("DROP TABLE alembic_version")
            expected = "is no database of the gateway"
        else:
            connection.execute("UPDATE alembic_version SET version_num = '9999'")
            expected = f"newer gateway .revision 9999, this one has {HEAD}"
        connection.commit()
    return expected


@pytest.mark.parametrize(
    "how", ["damaged", "cut short", "no database", "of another program", "newer"]
)
async def test_what_is_no_sound_backup_replaces_nothing(
    file: Path, tmp_path: Path, how: str
) -> None:
    backup = tmp_path / "backup.db"
    await back_up(url_of(file), backup)
    before = dump(file)
    expected = broken(backup, how)
    for attempt in (check(url_of(backup)), restore(backup, url_of(file))):
        with pytest.raises(DatabaseError, match=expected):
            await attempt
    assert dump(file) == before
    assert sorted(one.name for one in file.parent.iterdir()) == ["gateway.db"]


async def fill(database: Database) -> None:
    """Write rows of every type of column."""
    async with database.write() as connection:
        records: list[dict[str, Any]] = [
            {
                "id": f"r{number}", "at_ms": number, "request_id": "r", "key_id": "k",
                "model": "m", "engine": "e", "endpoint": "chat", "status": 200,
                "outcome": "completed", "prompt_tokens": number, "cached_tokens": 0,
                "completion_tokens": 2**40, "reasoning_tokens": 0, "estimated": bool(number % 2),
                "queue_ms": None, "ttft_ms": 0.1 * number, "total_ms": 1.5, "cost_nano": number,
            }
            for number in range(2500)
        ]  # fmt: skip
        await connection.execute(insert(usage_records), records)
        key = {
            "id": "k", "name": "é\u2028", "owner": "", "role": "client", "digest": bytes(range(32)),
            "models": ["*", "a\"b"], "fields": None, "priority": 0, "weight": 1, "disabled": False,
            "created_ms": 1, "revision": 7,
        }  # fmt: skip
        await connection.execute(insert(api_keys), key)


async def contents(url: str) -> dict[str, list[tuple[Any, ...]]]:
    async with opened(url) as database, database.read() as connection:
        return {
            table.name: sorted(
                (tuple(row) for row in await connection.execute(select(table))), key=str
            )
            for table in metadata.sorted_tables
        }


@pytest.mark.services
@pytest.mark.slow
class TestPostgres:
    @pytest.fixture
    async def filled(self, file: Path) -> Path:
        async with opened(url_of(file), deadline_s=PATIENCE_S) as database:
            await fill(database)
        return file

    async def test_every_row_goes_there_and_back(
        self, filled: Path, tmp_path: Path, own_postgres: PostgresServer
    ) -> None:
        there = own_postgres.url("postgres")
        counts = await copy(url_of(filled), there)
        assert counts["usage_records"] == 2500
        before = await contents(url_of(filled))
        assert await contents(there) == before
        backup = tmp_path / "backup.db"
        assert await back_up(there, backup) == counts
        assert await contents(url_of(backup)) == before
        again = own_postgres.create("again")
        assert await restore(backup, again) == (None, counts)
        assert await contents(again) == before
        assert await check(again) == counts

    async def test_a_target_with_rows_is_left_as_it_is(
        self, filled: Path, own_postgres: PostgresServer
    ) -> None:
        there = own_postgres.url("postgres")
        await copy(url_of(filled), there)
        before = await contents(there)
        for attempt in (copy(url_of(filled), there), restore(filled, there)):
            with pytest.raises(BackupFault, match="not empty: 1 rows in api_keys"):
                await attempt
        assert await contents(there) == before

    async def test_a_copy_that_is_interrupted_leaves_nothing(
        self, filled: Path, own_postgres: PostgresServer
    ) -> None:
        there = own_postgres.url("postgres")
        async with opened(there, deadline_s=PATIENCE_S) as database, database.write() as other:
            await other.execute(text("LOCK TABLE usage_records IN SHARE MODE"))
            copying = asyncio.create_task(copy(url_of(filled), there))
            waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            while not copying.done() and not await other.scalar(waiting):
                await asyncio.sleep(0.02)
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
        left = await contents(there)
        assert (left["api_keys"], left["usage_records"]) == ([], [])
        assert (await copy(url_of(filled), there))["usage_records"] == 2500

    async def test_a_server_that_is_away_is_one_line(
        self, filled: Path, own_postgres: PostgresServer
    ) -> None:
        url = own_postgres.url("postgres")
        own_postgres.stop()
        with pytest.raises(DatabaseUnavailable, match="does not answer"):
            await copy(url_of(filled), url)


async def test_captures_are_in_no_backup_and_no_copy(file: Path, tmp_path: Path) -> None:
    """A copy would outlive their retention."""
    sealed = b"sealed-canary" * 500
    row = "INSERT INTO captures VALUES ('1', 1, 2, 'key', 'key key', 'demo', ?, ?)"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute(row, (len(sealed), sealed))
        connection.commit()
    backup, copied = tmp_path / "backup.db", tmp_path / "copied.db"
    await back_up(url_of(file), backup)
    await copy(url_of(file), url_of(copied))
    for found in (backup, copied):
        assert b"sealed-canary" not in found.read_bytes()
        with contextlib.closing(sqlite3.connect(found)) as connection:
            assert connection.execute("SELECT count(*) FROM captures").fetchone() == (0,)
