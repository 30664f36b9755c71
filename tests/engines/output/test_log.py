"""The gateway's view of a log that somebody else writes and rotates."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.output.log import READ_BYTES, RING_LINES, EngineLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


def newest(log: EngineLog) -> list[str]:
    """Read the file; return the lines that are kept."""
    log.read()
    return log.lines()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_missing_file_has_no_lines(path: Path) -> None:
    log = EngineLog(path)
    assert newest(log) == []
    assert newest(log) == []


def test_an_empty_file_has_no_lines(path: Path) -> None:
    path.touch()
    assert newest(EngineLog(path)) == []


def test_a_file_that_comes_later_is_read_from_its_start(path: Path) -> None:
    log = EngineLog(path)
    assert newest(log) == []
    append(path, b"one\n")
    assert newest(log) == ["one"]


def test_new_lines_come_once_and_in_order(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"one\ntwo\n")
    assert newest(log) == ["one", "two"]
    assert newest(log) == ["one", "two"]
    append(path, b"three\n")
    assert newest(log) == ["one", "two", "three"]


def test_empty_lines_are_lines(path: Path) -> None:
    append(path, b"one\n\n\ntwo\n")
    assert newest(EngineLog(path)) == ["one", "", "", "two"]


def test_a_line_that_is_still_being_written_is_shown_and_then_completed(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"one\nload")
    assert newest(log) == ["one", "load"]
    assert newest(log) == ["one", "load"]
    append(path, b"ing")
    assert newest(log) == ["one", "loading"]
    append(path, b" done\ntwo\n")
    assert newest(log) == ["one", "loading done", "two"]


def test_a_character_cut_in_two_is_whole_again(path: Path) -> None:
    log = EngineLog(path)
    word = "é".encode()
    append(path, word[:1])
    newest(log)
    append(path, word[1:] + b"\n")
    assert newest(log) == ["é"]


def test_bytes_that_are_not_utf8_are_replaced(path: Path) -> None:
    append(path, b"a\xffb\n\xfe\x00\n")
    assert newest(EngineLog(path)) == ["a\ufffdb", "\ufffd\x00"]


def test_after_rotation_the_new_file_follows_the_old_lines(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"old one\nold two\n")
    newest(log)
    path.rename(path.with_suffix(".log.1"))
    append(path, b"new one\n")
    assert newest(log) == ["old one", "old two", "new one"]


def test_after_rotation_a_larger_new_file_is_read_from_its_start(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"old\n")
    newest(log)
    path.rename(path.with_suffix(".log.1"))
    append(path, b"new one\nnew two\nnew three\n")
    assert newest(log) == ["old", "new one", "new two", "new three"]


def test_between_rotation_and_the_new_file_the_old_lines_stay(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"old\n")
    newest(log)
    path.rename(path.with_suffix(".log.1"))
    assert newest(log) == ["old"]
    append(path, b"new\n")
    assert newest(log) == ["old", "new"]


def test_an_unfinished_line_is_not_glued_to_the_next_file(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"old\ncut")
    newest(log)
    path.rename(path.with_suffix(".log.1"))
    append(path, b"new\n")
    lines = newest(log)
    assert "cutnew" not in lines
    assert lines[-1] == "new"


def test_a_truncated_file_is_read_from_its_start(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"a long first line\nsecond\n")
    newest(log)
    os.truncate(path, 0)
    append(path, b"new\n")
    assert newest(log) == ["a long first line", "second", "new"]


def test_the_ring_keeps_the_newest_lines(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"".join(b"%d\n" % number for number in range(RING_LINES + 50)))
    lines = newest(log)
    assert len(lines) == RING_LINES
    assert lines[0] == "50"
    assert lines[-1] == str(RING_LINES + 49)
    append(path, b"last\n")
    assert newest(log)[0] == "51"
    assert newest(log)[-1] == "last"


def test_of_a_log_that_grew_much_only_the_end_is_read(path: Path) -> None:
    append(path, b"first\n" + b"x" * (READ_BYTES * 2) + b"\nlast\n")
    lines = newest(EngineLog(path))
    assert lines[-1] == "last"
    assert "first" not in lines
    assert sum(map(len, lines)) <= READ_BYTES


def test_a_jump_over_a_part_of_the_log_does_not_glue_lines_together(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"begin")
    newest(log)
    append(path, b"x" * (READ_BYTES + 100) + b"y\nlast\n")
    lines = newest(log)
    assert lines[-1] == "last"
    assert not any(line.startswith("begin") and line.endswith("y") for line in lines)


def test_a_line_without_end_is_bounded(path: Path) -> None:
    """A progress bar that never writes a newline must not grow in memory for ever."""
    log = EngineLog(path)
    for _ in range(4):
        append(path, b"\r 10%" * (READ_BYTES // 5))
        lines = newest(log)
    assert sum(map(len, lines)) <= 2 * READ_BYTES


@pytest.mark.slow
@given(
    pieces=st.lists(st.text("ab\né", max_size=8).map(lambda text: text.encode()), max_size=8),
    looks=st.lists(st.booleans(), min_size=8, max_size=8),
)
@settings(max_examples=100, deadline=None)
def test_however_often_one_looks_the_lines_are_the_files(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], looks: list[bool]
) -> None:
    path = tmp_path_factory.mktemp("log") / "engine.log"
    log = EngineLog(path)
    for piece, look in zip(pieces, looks, strict=False):
        append(path, piece)
        if look:
            newest(log)
    wanted = b"".join(pieces).decode().split("\n")
    assert newest(log) == (wanted if wanted[-1] else wanted[:-1])


def test_a_line_is_told_as_new_once_and_when_it_is_whole(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"one\ntw")
    assert log.read() == ["one"]
    append(path, b"o\n")
    assert log.read() == ["two"]
    assert log.read() == []
