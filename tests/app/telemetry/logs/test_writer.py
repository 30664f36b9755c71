"""The log's way out, over real pipes and files: what blocks, what is full, what is moved away."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.telemetry.logs import writer
from app.telemetry.logs.writer import LOOK_S, LogFile, Writer, check_file

PIPE_BYTES = 4096


class Pipe:
    """A pipe that takes PIPE_BYTES until somebody reads."""

    def __init__(self) -> None:
        import fcntl

        self.reading, self.writing = os.pipe()
        fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read_until(self, text: str) -> str:
        """Return all that comes up to and with a text."""
        seen = ""
        while text not in seen:
            piece = os.read(self.reading, 65536)
            assert piece
            seen += piece.decode()
        return seen

    def read_all(self) -> str:
        """Return what was written and not read; nobody may write any more."""
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
    one = Pipe()
    yield one
    one.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tell(level: int, text: str) -> str:
    return f"{level} {text}"


def test_what_was_put_is_written_in_order_before_the_block_ends(pipe: Pipe) -> None:
    with Writer(pipe.writing, None, tell) as log:
        log.put("one\n")
        log.put("two\nthree\n", 2)
    assert pipe.read_all() == "one\ntwo\nthree\n"
    assert log.lost == 0


def test_a_pipe_that_nobody_reads_stops_no_caller_and_what_is_lost_is_told(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING", 50_000)
    line = "x" * 99 + "\n"
    with Writer(pipe.writing, None, tell) as log:
        for _ in range(5000):  # ten times what fits
            log.put(line)
        lost = log.lost
        assert lost > 0
        written = pipe.read_until(f"30 {lost} lines of the log were lost\n")
        assert written.count(line) == 5000 - lost
        log.put("flows again\n")
        pipe.read_until("flows again\n")
        assert log.lost == lost


def test_the_end_does_not_wait_for_ever_for_a_pipe_that_nobody_reads(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CLOSE_S", 0)
    with Writer(pipe.writing, None, tell) as log:
        log.put("x" * 10 * PIPE_BYTES + "\n")
    log.put("too late\n")
    assert log.lost == 1
    pipe.read_until("\n")
    log._thread.join()


def test_a_pipe_set_to_not_block_by_its_other_user_is_waited_for(pipe: Pipe) -> None:
    os.set_blocking(pipe.writing, False)
    with Writer(pipe.writing, None, tell) as log:
        log.put("x" * 10 * PIPE_BYTES + "\n")
        assert len(pipe.read_until("\n")) == 10 * PIPE_BYTES + 1


def test_a_closed_pipe_loses_lines_and_nothing_else(pipe: Pipe) -> None:
    os.close(pipe.reading)
    pipe.reading = -1
    with Writer(pipe.writing, None, tell) as log:
        log.put("one\n")
        log.put("two\nthree\n", 2)
    assert log.lost == 3


def test_a_process_without_standard_error_loses_lines() -> None:
    with Writer(None, None, tell) as log:
        log.put("one\n")
    assert log.lost == 1


class TestFile:
    def test_lines_are_appended_and_standard_error_stays_silent(
        self, pipe: Pipe, tmp_path: Path
    ) -> None:
        path = tmp_path / "log"
        path.write_text("before\n")
        with Writer(pipe.writing, LogFile(path), tell) as log:
            log.put("after\n")
        assert path.read_text() == "before\nafter\n"
        assert pipe.read_all() == ""

    def test_a_new_file_is_not_for_everybody(self, tmp_path: Path) -> None:
        LogFile(tmp_path / "log").close()
        assert (tmp_path / "log").stat().st_mode & 0o007 == 0

    def test_it_is_made_again_when_it_was_moved_away(self, tmp_path: Path) -> None:
        path, moved, clock = tmp_path / "log", tmp_path / "log.1", Clock()
        file = LogFile(path, clock)
        file.write(b"one\n")
        path.rename(moved)
        file.write(b"two\n")
        clock.now += LOOK_S
        file.write(b"three\n")
        file.close()
        assert (moved.read_text(), path.read_text()) == ("one\ntwo\n", "three\n")

    def test_a_full_disk_sends_lines_to_standard_error_until_it_is_not(
        self, pipe: Pipe, tmp_path: Path
    ) -> None:
        path, clock = tmp_path / "log", Clock()
        path.symlink_to("/dev/full")
        with Writer(pipe.writing, LogFile(path, clock), tell) as log:
            log.put("one\n")
            log.put("two\n")
            pipe_said = pipe.read_until("two\n")
            path.unlink()
            clock.now += LOOK_S
            log.put("three\n")
        warning = f"30 logs.file {path} cannot be written: No space left on device; its lines are"
        assert pipe_said == f"{warning} here until it can\none\ntwo\n"
        assert pipe.read_all() == f"30 logs.file {path} is written again\n"
        assert path.read_text() == "three\n"
        assert log.lost == 2

    def test_a_line_that_was_cut_short_gets_an_end(self, tmp_path: Path) -> None:
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

    def test_a_check_tells_what_is_wrong_and_leaves_nothing(self, tmp_path: Path) -> None:
        assert check_file(tmp_path / "log") is None
        assert check_file(tmp_path / "nowhere" / "log") == "No such file or directory"
        assert check_file(tmp_path) == "Is a directory"
        assert list(tmp_path.iterdir()) == []
