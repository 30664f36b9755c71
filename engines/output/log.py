"""The gateway's view of an engine's log file: new lines into a ring."""

import os
from collections import deque
from pathlib import Path

RING_LINES = 2000
# At most this much is read at a time: a log that grew while nobody looked is not worth more.
READ_BYTES = 512 * 1024


class EngineLog:
    """The last lines of a log that the guardian writes and rotates."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ring: deque[str] = deque(maxlen=RING_LINES)
        self._offset = 0
        self._inode = 0
        self._partial = b""

    def lines(self) -> list[str]:
        """Return the newest lines, oldest first, of what was read; the last may not be whole."""
        rest = [self._partial.decode("utf-8", "replace")] if self._partial else []
        return [*self._ring, *rest]

    def read(self) -> list[str]:
        """Read what is new in the file; return the lines that are whole now."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._partial = status.st_ino, 0, b""
                start = max(self._offset, status.st_size - READ_BYTES)
                if start > self._offset:
                    self._partial = b""
                file.seek(start)
                data = file.read(READ_BYTES)
                self._offset = start + len(data)
        except FileNotFoundError:
            data = b""
        *whole, partial = (self._partial + data).split(b"\n")
        self._partial = partial[-READ_BYTES:]
        lines = [line.decode("utf-8", "replace") for line in whole]
        self._ring.extend(lines)
        return lines
