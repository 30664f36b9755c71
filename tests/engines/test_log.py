"""The gateway's view of a log that somebody else writes and rotates."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.log import READ_BYTES, RING_LINES, EngineLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_missing_file_has_no_lines(path: Path) -> None:
    log = EngineLog(path)
    assert log.lines() == []
    assert log.lines() == []


def test_an_empty_file_has_no_lines(path: Path) -> None:
    path.touch()
    assert EngineLog(path).lines() == []


def test_a_file_that_comes_later_is_read_from_its_start(path: Path) -> None:
    log = EngineLog(path)
    assert log.lines() == []
    append(path, b"one\n")
    assert log.lines() == ["one"]


def test_new_lines_come_once_and_in_order(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"one\ntwo\n")
    assert log.lines() == ["one", "two"]
    assert log.lines() == ["one", "two"]
    append(path, b"three\n")
    assert log.lines() == ["one", "two", "three"]


def test_empty_lines_are_lines(path: Path) -> None:
    append(path, b"one\n\n\ntwo\n")
    assert EngineLog(path).lines() == ["one", "", "", "two"]


def test_a_line_that_is_still_being_written_is_shown_and_then_completed(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"one\nload")
    assert log.lines() == ["one", "load"]
    assert log.lines() == ["one", "load"]
    append(path, b"ing")
    assert log.lines() == ["one", "loading"]
    append(path, b" done\ntwo\n")
    assert log.lines() == ["one", "loading done", "two"]


def test_a_character_cut_in_two_is_whole_again(path: Path) -> None:
    log = EngineLog(path)
    word = "é".encode()
    append(path, word[:1])
    log.lines()
    append(path, word[1:] + b"\n")
    assert log.lines() == ["é"]


def test_bytes_that_are_not_utf8_are_replaced(path: Path) -> None:
    append(path, b"a\xffb\n\xfe\x00\n")
    assert EngineLog(path).lines() == ["a\ufffdb", "\ufffd\x00"]


def test_after_rotation_the_new_file_follows_the_old_lines(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"old one\nold two\n")
    log.lines()
    path.rename(path.with_suffix(".log.1"))
    append(path, b"new one\n")
    assert log.lines() == ["old one", "old two", "new one"]


def test_after_rotation_a_larger_new_file_is_read_from_its_start(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"old\n")
    log.lines()
    path.rename(path.with_suffix(".log.1"))
    append(path, b"new one\nnew two\nnew three\n")
    assert log.lines() == ["old", "new one", "new two", "new three"]


def test_between_rotation_and_the_new_file_the_old_lines_stay(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"old\n")
    log.lines()
    path.rename(path.with_suffix(".log.1"))
    assert log.lines() == ["old"]
    append(path, b"new\n")
    assert log.lines() == ["old", "new"]


def test_an_unfinished_line_is_not_glued_to_the_next_file(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"old\ncut")
    log.lines()
    path.rename(path.with_suffix(".log.1"))
    append(path, b"new\n")
    lines = log.lines()
    assert "cutnew" not in lines
    assert lines[-1] == "new"


def test_a_truncated_file_is_read_from_its_start(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"a long first line\nsecond\n")
    log.lines()
    os.truncate(path, 0)
    append(path, b"new\n")
    assert log.lines() == ["a long first line", "second", "new"]


def test_the_ring_keeps_the_newest_lines(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"".join(b"%d\n" % number for number in range(RING_LINES + 50)))
    lines = log.lines()
    assert len(lines) == RING_LINES
    assert lines[0] == "50"
    assert lines[-1] == str(RING_LINES + 49)
    append(path, b"last\n")
    assert log.lines()[0] == "51"
    assert log.lines()[-1] == "last"


def test_of_a_log_that_grew_much_only_the_end_is_read(path: Path) -> None:
    append(path, b"first\n" + b"x" * (READ_BYTES * 2) + b"\nlast\n")
    lines = EngineLog(path).lines()
    assert lines[-1] == "last"
    assert "first" not in lines
    assert sum(map(len, lines)) <= READ_BYTES


def test_a_jump_over_a_part_of_the_log_does_not_glue_lines_together(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"begin")
    log.lines()
    append(path, b"x" * (READ_BYTES + 100) + b"y\nlast\n")
    lines = log.lines()
    assert lines[-1] == "last"
    assert not any(line.startswith("begin") and line.endswith("y") for line in lines)


def test_a_line_without_end_is_bounded(path: Path) -> None:
    """A progress bar that never writes a newline must not grow in memory for ever."""
    log = EngineLog(path)
    for _ in range(4):
        append(path, b"\r 10%" * (READ_BYTES // 5))
        lines = log.lines()
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
            log.lines()
    wanted = b"".join(pieces).decode().split("\n")
    assert log.lines() == (wanted if wanted[-1] else wanted[:-1])
