"""Writes the log to standard error or a file, in a thread of its own.

A pipe that is not read blocks its writer, and a disk may be full. So callers put lines into a
bounded buffer and never wait. Lines that find no room are counted and reported in one line once
writing works again.

Not QueueListener with WatchedFileHandler: a line of 400 bytes takes them 12 µs of CPU (26 µs with
its LogRecord) against 4 µs here, since they call stat for each line; their queue is bounded by
lines instead of bytes, stop() waits for a blocked pipe without a limit, and a full disk loses lines
silently. Adding these guarantees takes as much code as this module.
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
MAX_BUFFERED = 8 * 1024 * 1024
# How long an exit waits for a pipe that is not read.
CLOSE_S = 2.0
# How often the path is checked; logrotate moves the file away.
CHECK_S = 1.0
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

# Formats a log line of the writer itself.
Format = Callable[[int, str], str]


class Output(Protocol):
    """Takes lines of the log."""

    @property
    def lost(self) -> int:
        """Number of lines that did not reach their destination."""

    def put(self, text: str, lines: int = 1) -> None:
        """Accept whole lines, each with its line end. Never waits, never raises."""


class DirectOutput:
    """Writes to `sys.stderr` at once; for an application that runs without the command."""

    lost = 0

    def put(self, text: str, lines: int = 1) -> None:
        """See `Output`."""
        sys.stderr.write(text)


class LogFile:
    """A file that is appended to, and created again after it was moved away."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Open it. Raises OSError."""
        self.path = path
        self._clock = clock
        self._file = self._open()
        self._checked = clock()
        self._torn = False  # its last line has no line end

    def write(self, data: bytes) -> None:
        """Append lines. Raises OSError, possibly after writing a part of them."""
        if self._clock() - self._checked >= CHECK_S:
            self._reopen_if_moved()
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
        """Close the file."""
        os.close(self._file)

    def _reopen_if_moved(self) -> None:
        """Open the path again if it names another file or none. Raises OSError."""
        self._checked = self._clock()
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


class LogWriter:
    """The log's output. Leaving its context flushes the buffer, for at most CLOSE_S."""

    def __init__(self, stderr: int | None, file: LogFile | None, format_line: Format) -> None:
        """`stderr` is None if the process has no standard error."""
        self._stderr = stderr
        self._file = file
        self._format = format_line
        self._buffer: deque[tuple[str, int]] = deque()
        self._size = 0  # of the buffer, in characters
        self._wake = threading.Condition()
        self._closing = False
        self._unreported = 0  # lost and not yet reported
        self._fallback = False  # lines for the file go to standard error
        self._missing = 0  # lines that the file lacks since it was last written
        self.lost = 0
        # A daemon: a blocked write must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)

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
            if self._size + len(text) > MAX_BUFFERED or self._closing:
                self.lost += lines
                self._unreported += lines
                return
            self._size += len(text)
            self._buffer.append((text, lines))
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._buffer and not self._closing:
                    self._wake.wait()
                if not self._buffer:
                    return
                batch = list(self._buffer)
                self._buffer.clear()
                self._size = 0
            for text, lines in batch:
                self._write(text, lines)
            with self._wake:
                unreported = 0 if self._buffer else self._unreported
            if unreported and self._write(self._warning(f"{unreported} log lines were lost"), 0):
                with self._wake:
                    self._unreported -= unreported

    def _write(self, text: str, lines: int) -> bool:
        """Write lines to their destination, else count them as lost; return whether it worked."""
        data = text.encode("utf-8", "replace")
        if self._file is None:
            if self._to_stderr(data):
                return True
            self._count(lines, unreported=True)
            return False
        try:
            self._file.write(self._gap() + data)
        except OSError as error:
            self._count(lines)
            self._missing += lines
            if not self._fallback:
                self._fallback = True
                fault = f"cannot write logs.file {self._file.path}: {error.strerror}"
                self._to_stderr(self._warning(f"{fault}; logging to standard error").encode())
            return self._to_stderr(data)
        if self._fallback:
            self._fallback = False
            self._missing = 0
            line = self._warning(f"writing logs.file {self._file.path} again")
            self._to_stderr(line.encode())
        return True

    def _gap(self) -> bytes:
        """Return the line for a file that could not be written, which tells what it lacks."""
        if not self._missing:
            return b""
        text = f"{self._missing} log lines are missing here, since this file could not be written"
        return self._warning(f"{text}; they went to standard error").encode()

    def _warning(self, text: str) -> str:
        return f"{self._format(logging.WARNING, text)}\n"

    def _count(self, lines: int, *, unreported: bool = False) -> None:
        with self._wake:
            self.lost += lines
            self._unreported += lines if unreported else 0

    def _to_stderr(self, data: bytes) -> bool:
        """Write to standard error, waiting for it if needed; return whether it worked."""
        if self._stderr is None:
            return False
        try:
            while data:
                data = data[_write(self._stderr, data) :]
        except OSError:
            return False
        return True


def _write(file: int, data: bytes) -> int:
    """Write a part of the data; return its length. Waits while the file accepts nothing."""
    while True:
        try:
            return os.write(file, data)
        except BlockingIOError:
            select.select((), (file,), ())


def check_file(path: Path) -> str | None:
    """Return why a file cannot be appended to, None if it can; leave no new file behind."""
    new = not path.exists()
    try:
        os.close(os.open(path, _FLAGS, 0o640))
        if new:
            path.unlink()
    except OSError as error:
        return error.strerror
    return None
