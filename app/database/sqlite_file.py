"""The file of an SQLite database: only its owner may read it, and its disk must have room."""

import contextlib
import logging
import os
import stat
from pathlib import Path

log = logging.getLogger(__name__)

# The file itself and SQLite's files of WAL mode, which get the same permissions.
COMPANIONS = ("", "-wal", "-shm")
PRIVATE = stat.S_IRUSR | stat.S_IWUSR
FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# Room that SQLite takes to open a database in WAL mode, and to write a little.
FULL_BYTES = 256 * 1024


def make_private(file: Path) -> None:
    """Create the file with mode 0600, or restrict the mode of an existing one.

    A file whose mode cannot be changed is reported in the log. Raises OSError.
    """
    file = Path(os.path.realpath(file))  # SQLite follows links too
    file.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        os.close(os.open(file, flags, PRIVATE))
        return
    try:
        for suffix in COMPANIONS:
            with contextlib.suppress(FileNotFoundError):
                _restrict(Path(f"{file}{suffix}"))
    except OSError:
        log.warning("database file %s is open to other users; give it mode 0600", file)


def disk_fault(file: Path) -> str | None:
    """Return why nothing can be written beside a file, such as SQLite's own files; None: it can."""
    try:
        disk = os.statvfs(Path(os.path.realpath(file)).parent)
    except OSError:
        return None
    if disk.f_flag & os.ST_RDONLY:
        return "its disk is read-only"
    if disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < FULL_BYTES:  # /proc has no blocks
        return "its disk is full"
    if disk.f_files > 0 and disk.f_favail == 0:  # some file systems count no files
        return "its disk has no inode left"
    return None


def _restrict(file: Path) -> None:
    """Remove the permissions of other users. Raises OSError."""
    # By path: closing the file here would release SQLite's locks on it in this process.
    found = file.stat()
    if stat.S_ISREG(found.st_mode) and found.st_mode & FOR_OTHERS:
        if found.st_uid != os.geteuid():
            raise PermissionError
        file.chmod(stat.S_IMODE(found.st_mode) & PRIVATE)
