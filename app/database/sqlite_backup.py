"""Consistent copies of an SQLite database, checks of them, and their way back.

A database in WAL mode is three files, so `cp` of the one is no backup of it. A copy made here is
one file, which belongs to its owner alone.
"""

import contextlib
import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from app.database.errors import DatabaseError
from app.database.migrate import HEAD
from app.database.schema import captures, metadata
from app.database.sqlite_file import PRIVATE, disk_fault

# The bytes on which every connection in WAL mode holds a lock: SHARED_FIRST and SHARED_SIZE of
# https://www.sqlite.org/src/file/src/os.h
_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510
# The byte of the -shm on which it holds one: UNIX_SHM_DMS of
# https://www.sqlite.org/src/file/src/os_unix.c
_SHM_IN_USE = 128
_WAIT_S = 30.0
# In the names of files that are no backups yet.
PART = "unfinished-backup"
# Maximum time that the check after an unclean end delays a start; it reads about 300 MB a second.
CHECK_S = 10.0


class BackupFault(DatabaseError):
    """What is wrong with a database or a backup, in one line."""


def back_up(database: Path, backup: Path) -> None:
    """Write a copy of what is committed, while gateways go on writing.

    The copy appears under its name when it is whole. Raises BackupFault and OSError.
    """
    if backup.exists():
        raise BackupFault(f"{backup}: exists already; a backup overwrites nothing")
    part = part_of(backup, "copy")
    part.unlink(missing_ok=True)
    try:
        _copy(database, part)
        check(part)
        os.link(part, backup)  # unlike a rename it fails if somebody made the file meanwhile
    except FileExistsError:
        raise BackupFault(f"{backup}: exists already; a backup overwrites nothing") from None
    finally:
        part.unlink(missing_ok=True)
    _sync(backup.parent)


def part_of(backup: Path, what: str) -> Path:
    """Return the file of this process with a part of the work on a backup."""
    return backup.with_name(f"{backup.name}.{PART}.{os.getpid()}.{what}")


def restore(backup: Path, database: Path) -> Path | None:
    """Put a backup in the place of a database that nobody uses; return where the old one is kept.

    None: there was none. The old one's -wal and -shm go with it: SQLite would apply them to the
    new one. Raises BackupFault, before anything has changed, and OSError.
    """
    check(backup)
    database = Path(os.path.realpath(database))  # a link to it stays a link
    database.parent.mkdir(parents=True, exist_ok=True)
    part = database.with_name(f"{database.name}.restoring")
    part.unlink(missing_ok=True)
    try:
        _copy(backup, part)
        if not database.exists():
            with _lost_and_unused(database):
                _set_companions_aside(database, f"{database}.{_now()}")
                part.replace(database)
            kept = None
        else:
            with unused(database):
                kept = database.with_name(f"{database.name}.before-{_now()}")
                _set_companions_aside(database, str(kept))
                os.link(database, kept)
                part.replace(database)
    finally:
        part.unlink(missing_ok=True)
    _sync(database.parent)
    return kept


def check(database: Path) -> dict[str, int]:
    """Read a whole database; return the number of rows of each table that this version knows.

    Raises BackupFault if it is damaged, is none of the gateway's, or is a newer gateway's.
    """
    try:
        with contextlib.closing(_connect(database)) as connection:
            faults = [row[0] for row in connection.execute("PRAGMA integrity_check(3)")]
            if faults != ["ok"]:
                raise BackupFault(f"{database}: damaged: {faults[0]}")
            listed = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
            names = {name for (name,) in listed}
            if "alembic_version" not in names:
                raise BackupFault(f"{database}: is no database of the gateway")
            for (found,) in connection.execute("SELECT version_num FROM alembic_version"):
                if found > HEAD:
                    raise BackupFault(
                        f"{database}: its tables are those of a newer gateway (revision {found}, "
                        f"this one has {HEAD})"
                    )
            known = [table.name for table in metadata.sorted_tables if table is not captures]
            tables = [name for name in known if name in names]
            counted = [connection.execute(f"SELECT count(*) FROM {name}") for name in tables]  # noqa: S608 - names of our schema
            return {name: row.fetchone()[0] for name, row in zip(tables, counted, strict=True)}
    except sqlite3.Error as error:
        raise BackupFault(f"{database}: {error}") from None


def damage_after_unclean_end(database: Path) -> str | None:
    """Return what is wrong with a database whose last gateway did not close it.

    None: it is sound, or was closed in order, or others use it, or it could not be read in CHECK_S,
    or its disk is full.
    Not for a process with connections of its own to it.
    """
    wal = Path(f"{os.path.realpath(database)}-wal")
    if not wal.exists() or wal.stat().st_size == 0:
        return None
    try:
        with unused(database):
            pass
    except (BackupFault, OSError):
        return None
    deadline = time.monotonic() + CHECK_S
    try:
        with contextlib.closing(_connect(database)) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
            found: str = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            return None if found == "ok" else found.splitlines()[-1]
    except sqlite3.Error as error:
        # A full disk, on which SQLite cannot make its files, is no damage.
        unread = "interrupted" in str(error) or disk_fault(database) is not None
        return None if unread else str(error)


def count_keys(database: Path) -> int:
    """Return the number of keys in a file; 0 where it is no database of a gateway."""
    try:
        with contextlib.closing(_connect(database)) as connection:
            counted: int = connection.execute("SELECT count(*) FROM api_keys").fetchone()[0]
            return counted
    except (sqlite3.Error, BackupFault):
        return 0


@contextlib.contextmanager
def unused(database: Path) -> Iterator[None]:
    """Keep everybody else from a database. Raises BackupFault if it is in use, and OSError.

    By SQLite's own lock, which the kernel releases with a process: one that was killed leaves
    nothing. Not for a process with connections of its own to it, which would lose their locks.
    """
    with _locked(database, database, _SHARED_FIRST, _SHARED_SIZE):
        yield


@contextlib.contextmanager
def _lost_and_unused(database: Path) -> Iterator[None]:
    """Do the same for a database whose file is lost, by what is left of its -shm.

    A gateway that runs on would write to the lost file, and delete the new one's -wal at its end.
    """
    shm = Path(f"{database}-shm")
    with _locked(shm, database, _SHM_IN_USE, 1) if shm.exists() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _locked(path: Path, database: Path, first: int, size: int) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, size, first)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise BackupFault(
                f"{database}: in use: stop the gateway that runs on it first"
            ) from None
        yield
    finally:
        os.close(file)


def _copy(source: Path, target: Path) -> None:
    """Copy what is committed into a new file. Raises BackupFault and OSError."""
    os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE))
    try:
        with (
            contextlib.closing(_connect(source)) as read,
            contextlib.closing(_connect(target)) as written,
        ):
            read.backup(written)
            _erase_captures(written)
            # The copy inherits the mode, in which it would be three files again.
            written.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.Error as error:
        raise BackupFault(f"{source}: {error}") from None
    _sync(target)


def _erase_captures(copy: sqlite3.Connection) -> None:
    """Overwrite captures: a copy outlives their retention."""
    table = "SELECT 1 FROM sqlite_master WHERE name = 'captures'"  # older databases have none
    if copy.execute(table).fetchone():
        copy.execute("PRAGMA secure_delete=ON")
        copy.execute("DELETE FROM captures")
        copy.commit()


def _connect(database: Path) -> sqlite3.Connection:
    """Open a database that exists. Raises BackupFault."""
    if not database.is_file():
        raise BackupFault(f"{database}: no such file")
    return sqlite3.connect(f"{database.absolute().as_uri()}?mode=rw", uri=True, timeout=_WAIT_S)


def _set_companions_aside(database: Path, kept: str) -> None:
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{database}{suffix}", f"{kept}{suffix}")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")


def _sync(path: Path) -> None:
    """Have a file or the names of a directory on the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
