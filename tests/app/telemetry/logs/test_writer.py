"""The log writer on real pipes and files: blocked, closed, full, moved away."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.telemetry.logs import writer
from app.telemetry.logs.writer import CHECK_S, LogFile, LogWriter, check_file

PIPE_BYTES = 4096


class Pipe:
    """A pipe that holds PIPE_BYTES until it is read."""

    def __init__(self) -> None:
        import fcntl

        self.reading, self.writing = os.pipe()
        fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read_until(self, text: str) -> str:
        """Read up to and including a text."""
        seen = ""
        while text not in seen:
            piece = os.read(self.reading, 65536)
            assert piece
            seen += piece.decode()
        return seen

    def read_all(self) -> str:
        """Close the writing end and return what is left to read."""
        os.close(self.writing)
        self.writing = -1
        pieces = iter(lambda: os.read(self.reading, 65536), b"")
        return b"".join(pieces).decode()

    def close(self) -> None:
        for end in (self.reading, self.writing):
            if end >= 0:
                os.close(end)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def format_line(level: int, text: str) -> str:
    return f"{level} {text}"


def test_lines_are_flushed_in_order_at_exit(pipe: Pipe) -> None:
    with LogWriter(pipe.writing, None, format_line) as log:
        log.put("one\n")
        log.put("two\nthree\n", 2)
    assert pipe.read_all() == "one\ntwo\nthree\n"
    assert log.lost == 0


def test_unread_pipe_blocks_no_caller_and_lost_lines_are_reported(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_BUFFERED", 50_000)
    line = "x" * 99 + "\n"
    with LogWriter(pipe.writing, None, format_line) as log:
        for _ in range(5000):  # ten times what fits
            log.put(line)
        lost = log.lost
        assert lost > 0
        written = pipe.read_until(f"30 {lost} log lines were lost\n")
        assert written.count(line) == 5000 - lost
        log.put("works again\n")
        pipe.read_until("works again\n")
        assert log.lost == lost


def test_exit_does_not_wait_for_an_unread_pipe(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CLOSE_S", 0)
    with LogWriter(pipe.writing, None, format_line) as log:
        log.put("x" * 10 * PIPE_BYTES + "\n")
    log.put("too late\n")
    assert log.lost == 1
    pipe.read_until("\n")
    log._thread.join()


def test_non_blocking_pipe_is_written_completely(pipe: Pipe) -> None:
    os.set_blocking(pipe.writing, False)
    with LogWriter(pipe.writing, None, format_line) as log:
        log.put("x" * 10 * PIPE_BYTES + "\n")
        assert len(pipe.read_until("\n")) == 10 * PIPE_BYTES + 1


def test_lines_for_a_closed_pipe_are_counted_as_lost(pipe: Pipe) -> None:
    os.close(pipe.reading)
    pipe.reading = -1
    with LogWriter(pipe.writing, None, format_line) as log:
        log.put("one\n")
        log.put("two\nthree\n", 2)
    assert log.lost == 3


def test_lines_without_a_standard_error_are_counted_as_lost() -> None:
    with LogWriter(None, None, format_line) as log:
        log.put("one\n")
    assert log.lost == 1


class TestFile:
    def test_lines_are_appended_to_the_file_only(self, pipe: Pipe, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_text("before\n")
        with LogWriter(pipe.writing, LogFile(path), format_line) as log:
            log.put("after\n")
        assert path.read_text() == "before\nafter\n"
        assert pipe.read_all() == ""

    def test_new_file_is_not_readable_by_others(self, tmp_path: Path) -> None:
        LogFile(tmp_path / "log").close()
        assert (tmp_path / "log").stat().st_mode & 0o007 == 0

    def test_file_is_created_again_after_it_was_moved(self, tmp_path: Path) -> None:
        path, moved, clock = tmp_path / "log", tmp_path / "log.1", Clock()
        file = LogFile(path, clock)
        file.write(b"one\n")
        path.rename(moved)
        file.write(b"two\n")
        clock.now += CHECK_S
        file.write(b"three\n")
        file.close()
        assert (moved.read_text(), path.read_text()) == ("one\ntwo\n", "three\n")

    def test_full_disk_sends_lines_to_standard_error_until_it_has_room(
        self, pipe: Pipe, tmp_path: Path
    ) -> None:
        path, clock = tmp_path / "log", Clock()
        path.symlink_to("/dev/full")
        with LogWriter(pipe.writing, LogFile(path, clock), format_line) as log:
            log.put("one\n")
            log.put("two\n")
            stderr = pipe.read_until("two\n")
            path.unlink()
            clock.now += CHECK_S
            log.put("three\n")
        warning = f"30 cannot write logs.file {path}: No space left on device;"
        assert stderr == f"{warning} logging to standard error\none\ntwo\n"
        assert pipe.read_all() == f"30 writing logs.file {path} again\n"
        gap = "30 2 log lines are missing here, since this file could not be written;"
        assert path.read_text() == f"{gap} they went to standard error\nthree\n"
        assert log.lost == 2

    def test_line_after_a_partial_write_starts_on_its_own_line(self, tmp_path: Path) -> None:
        file = LogFile(tmp_path / "log")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                file.write(b"a line of 21 bytes..\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        file.write(b"next\n")
        file.close()
        assert (tmp_path / "log").read_bytes() == b"a line of \nnext\n"

    def test_check_reports_the_error_and_leaves_no_file(self, tmp_path: Path) -> None:
        assert check_file(tmp_path / "log") is None
        assert check_file(tmp_path / "nowhere" / "log") == "No such file or directory"
        assert check_file(tmp_path) == "Is a directory"
        assert list(tmp_path.iterdir()) == []
