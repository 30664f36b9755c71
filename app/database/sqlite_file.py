"""File permissions of an SQLite database: only its owner may read the keys and the ledger."""

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


def _restrict(file: Path) -> None:
    """Remove the permissions of other users. Raises OSError."""
    # By path: closing the file here would release SQLite's locks on it in this process.
    found = file.stat()
    if stat.S_ISREG(found.st_mode) and found.st_mode & FOR_OTHERS:
        if found.st_uid != os.geteuid():
            raise PermissionError
        file.chmod(stat.S_IMODE(found.st_mode) & PRIVATE)
