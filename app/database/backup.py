"""Backups of a database, by its URL: a backup is one SQLite file, of PostgreSQL as well."""

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from app.database import copying, sqlite_backup
from app.database.errors import translate
from app.database.sqlite_backup import BackupFault, count_keys, damage_after_unclean_end

__all__ = [
    "BackupFault",
    "Counts",
    "back_up",
    "check",
    "copy",
    "count_keys",
    "damage_after_unclean_end",
    "restore",
]

# No backup under way leaves a file of its own alone for so long.
ABANDONED_S = 6 * 3600
# The number of rows of each table.
Counts = dict[str, int]


async def back_up(url: str, backup: Path) -> Counts:
    """Write a consistent copy of a database, while gateways run.

    Raises DatabaseError and OSError.
    """
    _delete_abandoned(backup.parent)
    if (file := _file_of(url)) is not None:
        sqlite_backup.back_up(file, backup)
        return sqlite_backup.check(backup)
    part = sqlite_backup.part_of(backup, "rows")
    _remove(part)
    try:
        async with _translated():
            await copying.copy_rows(url, _url_of(part))
        sqlite_backup.back_up(part, backup)
    finally:
        _remove(part)
    return sqlite_backup.check(backup)


async def restore(backup: Path, url: str) -> tuple[Path | None, Counts]:
    """Put a backup in the place of a database; return where the old file is kept, and what came.

    An SQLite file may be in use by nobody, and a PostgreSQL database must be empty. Raises
    DatabaseError, before anything has changed, and OSError.
    """
    if (file := _file_of(url)) is not None:
        kept = sqlite_backup.restore(backup, file)
        return kept, sqlite_backup.check(file)
    sqlite_backup.check(backup)
    async with _translated():
        # From a copy of the backup, which connections of ours would change.
        part = sqlite_backup.part_of(backup, "rows")
        _remove(part)
        try:
            sqlite_backup.back_up(backup, part)
            return None, await copying.copy_rows(_url_of(part), url)
        finally:
            _remove(part)


async def copy(source: str, target: str) -> Counts:
    """Copy every row into an empty database of either kind. Raises DatabaseError and OSError.

    A file that is read may be in use by nobody: what a gateway writes meanwhile would be missing.
    """
    if (file := _file_of(source)) is not None:
        sqlite_backup.check(file)
        with sqlite_backup.unused(file):
            pass
    async with _translated():
        return await copying.copy_rows(source, target)


async def check(url: str) -> Counts:
    """Read a database; SQLite's is searched for damage. Raises DatabaseError and OSError."""
    if (file := _file_of(url)) is not None:
        return sqlite_backup.check(file)
    async with _translated():
        return await copying.count_rows(url)


def _file_of(url: str) -> Path | None:
    """Return the file of an SQLite database; None for PostgreSQL. Raises BackupFault."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    if parsed.database in (None, "", ":memory:"):
        raise BackupFault("a database in memory has no file")
    return Path(str(parsed.database))


def _url_of(file: Path) -> str:
    return f"sqlite+aiosqlite:///{file.absolute()}"


def _delete_abandoned(directory: Path) -> None:
    """Delete what is left of backups that were killed, whose names say that they are none."""
    for file in directory.glob(f"*.{sqlite_backup.PART}*"):
        with contextlib.suppress(OSError):  # another backup deletes it, too
            if time.time() - file.stat().st_mtime > ABANDONED_S:
                file.unlink()


def _remove(file: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{file}{suffix}").unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        raise translate(error) from None
