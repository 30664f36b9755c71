"""The configuration file: read with its digest, and replaced in one step."""

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.settings.model_edit import EditRefused

BACKUP = ".bak"


@dataclass(frozen=True, slots=True)
class FileText:
    """The text of a file; `digest` tells whether it has changed since."""

    text: str
    digest: str

    @classmethod
    def of(cls, text: str) -> "FileText":
        return cls(text, hashlib.sha256(text.encode()).hexdigest())


class ConfigurationFile:
    """A file that this process may replace. Its methods block, and raise EditRefused."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> FileText:
        """Return the text, with its line ends."""
        try:
            return FileText.of(self.path.read_bytes().decode())
        except (OSError, UnicodeDecodeError) as error:
            raise self._refused(f"cannot be read: {error}") from None

    def replace(self, text: str, digest: str) -> None:
        """Replace the text that has this digest, and keep a copy of it next to the file.

        Owner, group and mode stay. A file that others have changed since stays as well.
        """
        found = self._writable()
        present = self._read_same(digest)
        backup = self.path.with_name(self.path.name + BACKUP)
        try:
            _write(backup, present.text, found, lambda: None)
            # Writing takes a moment, in which an editor may have saved the file.
            _write(self.path, text, found, lambda: self._read_same(digest))
        except OSError as error:
            raise self._refused(
                f"cannot be replaced: {error.strerror}; its directory must be writable, and the "
                "file not mounted by itself"
            ) from None

    def _read_same(self, digest: str) -> FileText:
        """Return the text of a digest."""
        present = self.read()
        if present.digest != digest:
            raise self._refused("has changed since this page was opened: open it again")
        return present

    def _writable(self) -> os.stat_result:
        try:
            found = self.path.lstat()
        except OSError as error:
            raise self._refused(f"cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(found.st_mode):
            raise self._refused(
                "is a link, as in a ConfigMap, and is not edited here: change what it leads to"
            )
        if not found.st_mode & 0o222 or not os.access(self.path, os.W_OK):  # root may anything
            raise self._refused("is read-only for the gateway, so it is not edited here")
        if found.st_uid != os.geteuid():
            raise self._refused("belongs to another user, so it is not edited here")
        return found

    def _refused(self, reason: str) -> EditRefused:
        return EditRefused(f"{self.path} {reason}")


def _write(path: Path, text: str, like: os.stat_result, check: Callable[[], object]) -> None:
    """Replace a file in one step, with the owner and the mode of another.

    `check` is called right before, and may raise EditRefused. Raises OSError.
    """
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as made:
        try:
            made.write(text.encode())
            os.fchown(made.fileno(), -1, like.st_gid)
            os.fchmod(made.fileno(), stat.S_IMODE(like.st_mode))
            made.flush()
            os.fsync(made.fileno())
            check()
            Path(made.name).replace(path)
        except (OSError, EditRefused):
            Path(made.name).unlink(missing_ok=True)
            raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
