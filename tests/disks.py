"""A small file system that one process and its children see, which a test fills and frees."""

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

MIB = 1024 * 1024
# Root may mount; whoever is not root becomes it in a user namespace, where the kernel allows that.
APART = ("unshare", "--mount", *(() if os.getuid() == 0 else ("--user", "--map-root-user")))
MOUNT = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'


class SmallDisk:
    """A tmpfs in a mount namespace of its own, gone with the last process there."""

    def __init__(self, place: Path, size: int, owner: int = 0) -> None:
        """Skip the test where nobody may mount; `owner` is a user's number."""
        self.place = place
        place.mkdir(parents=True, exist_ok=True)
        self._options = f"size={size},uid={owner}"
        tried = subprocess.run(self.command("true"), capture_output=True, text=True, check=False)
        if tried.returncode:
            pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")

    def command(self, *command: str) -> list[str]:
        """Return a command that runs another one with the disk at its place."""
        return [*APART, "sh", "-c", MOUNT, "sh", self._options, str(self.place), *command]

    def fill(self, pid: int) -> None:
        """Leave no byte free; `pid` is a process that sees the disk."""
        with self._filler(pid).open("wb", buffering=0) as file:
            for piece in (MIB, 4096, 1):
                with contextlib.suppress(OSError):  # no space left
                    while file.write(bytes(piece)):
                        pass

    def free(self, pid: int) -> None:
        """Take back what `fill` wrote."""
        self._filler(pid).unlink()

    def used_by(self, pid: int, pattern: str) -> int:
        """Return the bytes of the files whose names match."""
        return sum(file.stat().st_size for file in self._seen_by(pid).rglob(pattern))

    def _filler(self, pid: int) -> Path:
        return self._seen_by(pid) / "filler"

    def _seen_by(self, pid: int) -> Path:
        return Path(f"/proc/{pid}/root{self.place}")
