"""Follows an engine's log file as it grows. Synchronous: long reads belong in a thread.

The guardian renames a full log to NAME.1 and begins a new one; a new start of the engine renames
it to NAME.previous. No file is held open: the one that was being read is recognized by its inode
and by the last bytes that were read, since a new file may get the inode of a deleted one.
"""

import os
import re
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path

RENAMED = (".1", ".previous")
BLOCK_BYTES = 64 * 1024
# How far back `read_last` searches, and how much `read_new` reads at a time.
MAX_SEARCH_BYTES = 8 * 1024 * 1024
READ_BYTES = 512 * 1024
# The last bytes that were read, by which a file is recognized; lines of a log have a time.
MARK_BYTES = 256
# A longer line is cut: binary garbage and progress bars may never end.
MAX_LINE = 16 * 1024
RECENT_LINES = 2000
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def printable(line: bytes) -> str:
    """Return a line for display in a terminal: no colors, no control characters.

    Of text that carriage returns overwrite, as in progress bars, the last version remains.
    """
    text = line[: MAX_LINE + 1].decode("utf-8", "replace")
    if len(line) > MAX_LINE:
        text = f"{text[:MAX_LINE]}…"
    text = next((part for part in reversed(text.split("\r")) if part.strip()), "")
    text = _ANSI.sub("", text)
    if text.isprintable():
        return text
    return "".join(c for c in text if c.isprintable() or c == "\t")


def _decode(line: bytes) -> str:
    return line.decode("utf-8", "replace")


class LogFollower:
    """Reads a log file that may grow, be replaced, or not exist yet.

    It loses no line unless the file is replaced twice between two calls.

    With `newest_only` it skips what exceeds READ_BYTES, and the rest of a file that was replaced.
    """

    def __init__(
        self, path: Path, show: Callable[[bytes], str] = printable, *, newest_only: bool = False
    ) -> None:
        self._path = path
        self._show = show
        self._newest_only = newest_only
        # Device and inode of the file that is being read, the position in it, and what is before.
        self._file_id: tuple[int, int] | None = None
        self._offset = 0
        self._mark = b""
        self._unfinished = b""  # the line before `_offset` that has no end yet

    def read_last(self, count: int) -> list[str]:
        """Return the last complete lines, oldest first; `read_new` continues after them.

        Raises OSError.
        """
        try:
            file = FileIO(self._path)
        except FileNotFoundError:
            return []
        with file:
            self._file_id = _file_id(file.fileno())
            self._offset = start = file.seek(0, os.SEEK_END)
            blocks: list[bytes] = []
            ends = 0
            while start > 0 and ends <= count and self._offset - start < MAX_SEARCH_BYTES:
                size = min(BLOCK_BYTES, start)
                start -= size
                file.seek(start)
                blocks.append(file.read(size))
                ends += blocks[-1].count(b"\n")
        data = b"".join(reversed(blocks))
        self._mark = data[-MARK_BYTES:]
        *lines, self._unfinished = data.split(b"\n")
        if start > 0:
            lines = lines[1:]  # the first one is incomplete
        return [self._show(line) for line in lines[max(len(lines) - count, 0) :]]

    def read_new(self) -> list[str]:
        """Return the lines completed since the last call, or the first of many. Raises OSError."""
        try:
            file = FileIO(self._path)
        except FileNotFoundError:
            return self._read_renamed() or []
        with file:
            lines: list[str] = []
            if not self._is_being_read(file):
                if (renamed := self._read_renamed()) is not None:
                    return renamed
                if not self._newest_only:
                    lines = self.unfinished()
                self._file_id = _file_id(file.fileno())
                self._begin_at(0)
            return lines + self._read(file)

    def unfinished(self) -> list[str]:
        """Return the last line if it has no end yet."""
        return [self._show(self._unfinished)] if self._unfinished else []

    def _read_renamed(self) -> list[str] | None:
        """Return new lines of the file being read if it was renamed; None when it has no more."""
        for suffix in () if self._newest_only else RENAMED:
            try:
                file = FileIO(self._path.with_name(self._path.name + suffix))
            except FileNotFoundError:
                continue
            with file:
                if self._is_being_read(file):
                    before = self._offset
                    lines = self._read(file)
                    return lines if self._offset > before else None
        return None

    def _is_being_read(self, file: FileIO) -> bool:
        """Return whether this is the file of the last call; it may have been truncated since."""
        fd = file.fileno()
        if _file_id(fd) != self._file_id:
            return False
        found = os.pread(fd, len(self._mark), self._offset - len(self._mark))
        return found == self._mark or os.fstat(fd).st_size < self._offset

    def _begin_at(self, offset: int) -> None:
        """Read on at another position."""
        self._offset, self._mark, self._unfinished = offset, b"", b""

    def _read(self, file: FileIO) -> list[str]:
        size = os.fstat(file.fileno()).st_size
        if size < self._offset:  # truncated
            self._begin_at(0)
        if self._newest_only and size - self._offset > READ_BYTES:
            self._begin_at(size - READ_BYTES)
        file.seek(self._offset)
        data = file.read(READ_BYTES)
        self._offset += len(data)
        self._mark = (self._mark + data[-MARK_BYTES:])[-MARK_BYTES:]
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if self._newest_only:
            self._unfinished = self._unfinished[-READ_BYTES:]
        elif len(self._unfinished) > MAX_LINE:
            lines.append(self._unfinished)
            self._unfinished = b""
        return [self._show(line) for line in lines]


class EngineLog:
    """The newest lines of an engine's log, in memory, as the engine wrote them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._follower = LogFollower(path, _decode, newest_only=True)
        self._recent: deque[str] = deque(maxlen=RECENT_LINES)

    def lines(self) -> list[str]:
        """Return the newest lines read so far, oldest first; the last may be incomplete."""
        return [*self._recent, *self._follower.unfinished()]

    def read(self) -> list[str]:
        """Read the file; return the lines completed since the last call."""
        lines = self._follower.read_new()
        self._recent.extend(lines)
        return lines


def _file_id(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
