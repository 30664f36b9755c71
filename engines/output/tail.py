"""Reading a log from its end, and on as it grows. Synchronous: call it from a thread.

The guardian moves a full log away and begins a new one, and so does a new start of the engine. The
file is held open until it is read to its end, so that nothing is lost between the two.
"""

import os
import re
import threading
from io import FileIO
from pathlib import Path

BLOCK_BYTES = 64 * 1024
# How far back the last lines may reach, and how much is read on at a time.
BACK_BYTES = 8 * 1024 * 1024
READ_BYTES = 512 * 1024
# A line of binary garbage may have no end.
LONGEST_LINE = 16 * 1024
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def clean(line: bytes) -> str:
    """Return a line as a terminal may show it: no colours, no control characters.

    Of what carriage returns overwrote, as progress bars do, the last is left.
    """
    text = line[: LONGEST_LINE + 1].decode("utf-8", "replace")
    if len(line) > LONGEST_LINE:
        text = f"{text[:LONGEST_LINE]}…"
    text = next((part for part in reversed(text.split("\r")) if part.strip()), "")
    text = _ANSI.sub("", text)
    if text.isprintable():
        return text
    return "".join(c for c in text if c.isprintable() or c == "\t")


class Tail:
    """A log file that may grow, be replaced, or not be there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._partial = b""
        # One thread at a time: a caller that was cancelled closes while its thread still reads.
        self._lock = threading.Lock()
        self._closed = False

    def last(self, count: int) -> list[str]:
        """Return the last whole lines, oldest first, and stand behind them. Raises OSError."""
        with self._lock:
            if not self._open():
                return []
            assert self._file is not None
            end = start = self._file.seek(0, os.SEEK_END)
            blocks: list[bytes] = []
            ends = 0
            while start > 0 and ends <= count and end - start < BACK_BYTES:
                size = min(BLOCK_BYTES, start)
                start -= size
                self._file.seek(start)
                blocks.append(self._file.read(size))
                ends += blocks[-1].count(b"\n")
            self._file.seek(end)
            *whole, self._partial = b"".join(reversed(blocks)).split(b"\n")
            if start > 0:
                whole = whole[1:]  # it begins somewhere in a line
            return [clean(line) for line in whole[max(len(whole) - count, 0) :]]

    def more(self) -> list[str]:
        """Return the lines that were finished since, some of them where they are many.

        Raises OSError.
        """
        with self._lock:
            if not self._open():
                return []
            assert self._file is not None
            data = self._file.read(READ_BYTES)
            if data:
                return self._lines(data)
            if self._file.tell() > os.fstat(self._file.fileno()).st_size:
                self._file.seek(0)  # somebody emptied it
                self._partial = b""
                return self._lines(self._file.read(READ_BYTES))
            if not self._replaced():
                return []
            data = self._file.read(READ_BYTES)  # written before it was moved, after we looked
            if data:
                return self._lines(data)
            rest = self._take_partial()
            self._file.close()
            self._file = None
            return rest  # the new one is read next time

    def rest(self) -> list[str]:
        """Return the line that has no end yet, if there is one."""
        with self._lock:
            return self._take_partial()

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                self._file.close()
                self._file = None

    def _open(self) -> bool:
        if self._file is None and not self._closed:
            try:
                self._file = FileIO(self._path, "r")
            except FileNotFoundError:
                return False
        return self._file is not None

    def _replaced(self) -> bool:
        assert self._file is not None
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False  # the new one is about to come
        held = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino)

    def _lines(self, data: bytes) -> list[str]:
        *whole, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LONGEST_LINE:
            whole.append(self._partial)
            self._partial = b""
        return [clean(line) for line in whole]

    def _take_partial(self) -> list[str]:
        partial, self._partial = self._partial, b""
        return [clean(partial)] if partial else []
