"""Where the lines of the log go: standard error or a file, from a thread of their own.

A pipe that nobody reads stops whoever writes to it, and a disk may be full. So whoever logs leaves
a line in a bounded buffer and goes on. What finds no room is counted, and told of in one line once
lines flow again.
"""

import contextlib
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

# About 20,000 lines: ten seconds of a busy gateway.
MAX_WAITING = 8 * 1024 * 1024
# How long the end of the process waits for a pipe that is not read.
CLOSE_S = 2.0
# How often a file is looked for under its name; logrotate moves it away.
LOOK_S = 1.0
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

# Returns a line of the log that is the writer's own.
Tell = Callable[[int, str], str]


class Output(Protocol):
    """Takes lines of the log."""

    @property
    def lost(self) -> int:
        """How many did not get where they belong."""

    def put(self, text: str, lines: int = 1) -> None:
        """Take whole lines, each with its end. Never waits, never raises."""


class Direct:
    """Writes to `sys.stderr` at once; for an application that no command runs."""

    lost = 0

    def put(self, text: str, lines: int = 1) -> None:
        """See `Output`."""
        sys.stderr.write(text)


class LogFile:
    """A file that is appended to, and made again when somebody moved it away."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Open it. Raises OSError."""
        self.path = path
        self._clock = clock
        self._file = self._open()
        self._looked = clock()
        self._torn = False  # the last line in it has no end

    def write(self, data: bytes) -> None:
        """Append lines. Raises OSError, and has written some of them then, or none."""
        if self._clock() - self._looked >= LOOK_S:
            self._look()
        if self._torn:
            self._torn = _write(self._file, b"\n") == 0
        done = 0
        try:
            while done < len(data):
                done += _write(self._file, data[done:])
        finally:
            if done:
                self._torn = data[done - 1 : done] != b"\n"

    def close(self) -> None:
        """Let go of it."""
        os.close(self._file)

    def _look(self) -> None:
        """Take the file that has the name now. Raises OSError where none can be had."""
        self._looked = self._clock()
        held = os.fstat(self._file)
        with contextlib.suppress(FileNotFoundError):
            now = os.stat(self.path)
            if (now.st_dev, now.st_ino) == (held.st_dev, held.st_ino):
                return
        fresh = self._open()
        os.close(self._file)
        self._file, self._torn = fresh, False

    def _open(self) -> int:
        return os.open(self.path, _FLAGS, 0o640)


class Writer:
    """The log's output; a context, whose end waits for what was put, within CLOSE_S."""

    def __init__(self, stderr: int | None, file: LogFile | None, tell: Tell) -> None:
        """`stderr` is None where the process has none."""
        self._stderr = stderr
        self._file = file
        self._tell = tell
        self._waiting: deque[tuple[str, int]] = deque()
        self._size = 0  # of what waits, in characters
        self._wake = threading.Condition()
        self._closing = False
        self._unheard = 0  # lost, and not told of yet
        self._beside = False  # the file's lines go to standard error
        self.lost = 0
        # A daemon: a write that never returns must not keep the process from its end.
        self._thread = threading.Thread(target=self._run, name="write the log", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(CLOSE_S)
        if self._file is not None and not self._thread.is_alive():
            self._file.close()

    def put(self, text: str, lines: int = 1) -> None:
        """See `Output`."""
        with self._wake:
            if self._size + len(text) > MAX_WAITING or self._closing:
                self.lost += lines
                self._unheard += lines
                return
            self._size += len(text)
            self._waiting.append((text, lines))
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closing:
                    self._wake.wait()
                if not self._waiting:
                    return
                batch = list(self._waiting)
                self._waiting.clear()
                self._size = 0
            for text, lines in batch:
                self._write(text, lines)
            with self._wake:
                unheard = 0 if self._waiting else self._unheard
            if unheard and self._write(self._said(f"{unheard} lines of the log were lost"), 0):
                with self._wake:
                    self._unheard -= unheard

    def _write(self, text: str, lines: int) -> bool:
        """Write lines where they belong, else count them; return whether they were written."""
        data = text.encode("utf-8", "replace")
        if self._file is None:
            if self._to_stderr(data):
                return True
            self._count(lines, unheard=True)
            return False
        try:
            self._file.write(data)
        except OSError as error:
            self._count(lines)
            if not self._beside:
                self._beside = True
                where = f"logs.file {self._file.path} cannot be written: {error.strerror}"
                self._to_stderr(self._said(f"{where}; its lines are here until it can").encode())
            return self._to_stderr(data)
        if self._beside:
            self._beside = False
            told = self._said(f"logs.file {self._file.path} is written again")
            self._to_stderr(told.encode())
        return True

    def _said(self, text: str) -> str:
        return f"{self._tell(logging.WARNING, text)}\n"

    def _count(self, lines: int, *, unheard: bool = False) -> None:
        with self._wake:
            self.lost += lines
            self._unheard += lines if unheard else 0

    def _to_stderr(self, data: bytes) -> bool:
        """Write to standard error, however long that takes; return whether it could be."""
        if self._stderr is None:
            return False
        try:
            while data:
                data = data[_write(self._stderr, data) :]
        except OSError:
            return False
        return True


def _write(file: int, data: bytes) -> int:
    """Write some of it; return how much. Waits where the file takes nothing now."""
    while True:
        try:
            return os.write(file, data)
        except BlockingIOError:
            select.select((), (file,), ())


def check_file(path: Path) -> str | None:
    """Return why a file cannot be appended to, in a few words; leave nothing behind."""
    new = not path.exists()
    try:
        os.close(os.open(path, _FLAGS, 0o640))
        if new:
            path.unlink()
    except OSError as error:
        return error.strerror
    return None
