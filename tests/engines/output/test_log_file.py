"""Log files are followed through growth, rotation and truncation."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.output.log_file import (
    BLOCK_BYTES,
    MAX_LINE,
    MAX_SEARCH_BYTES,
    READ_BYTES,
    RECENT_LINES,
    EngineLog,
    LogFollower,
    printable,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


# Following without a loss


@pytest.fixture
def follower(path: Path) -> LogFollower:
    return LogFollower(path)


def test_last_lines_are_followed_by_new_ones(follower: LogFollower, path: Path) -> None:
    append(path, b"1\n2\n3\n")
    assert follower.read_last(2) == ["2", "3"]
    assert follower.read_new() == []
    append(path, b"4\nfi")
    assert follower.read_new() == ["4"]
    append(path, b"ve\n")
    assert follower.read_new() == ["five"]


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_at_most_count_last_lines_are_read(follower: LogFollower, path: Path, count: int) -> None:
    append(path, b"1\n2\n3\n")
    assert follower.read_last(count) == ["1", "2", "3"][3 - min(count, 3) :]


def test_unfinished_line_is_separate_from_the_last_lines(follower: LogFollower, path: Path) -> None:
    append(path, b"1\nhalf")
    assert follower.read_last(5) == ["1"]
    assert follower.unfinished() == ["half"]


def test_file_created_later_is_followed(follower: LogFollower, path: Path) -> None:
    assert follower.read_last(5) == []
    assert follower.read_new() == []
    append(path, b"1\n")
    assert follower.read_new() == ["1"]


def test_rotation_loses_no_line(follower: LogFollower, path: Path) -> None:
    append(path, b"1\n")
    assert follower.read_last(5) == ["1"]
    append(path, b"2\nhalf")
    path.replace(path.with_suffix(".log.1"))
    assert follower.read_new() == ["2"]
    assert follower.read_new() == []
    append(path, b"3\n")
    assert follower.read_new() == ["half", "3"]


def test_emptied_file_is_followed_from_its_start(follower: LogFollower, path: Path) -> None:
    append(path, b"1\n2\n3\n")
    follower.read_last(5)
    path.write_text("")
    assert follower.read_new() == []
    append(path, b"4\n")
    assert follower.read_new() == ["4"]


def test_last_lines_are_read_from_the_end_of_a_large_file(
    follower: LogFollower, path: Path
) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing
        file.seek(0, 2)
        file.write(b"\n1\n2\n")
    assert follower.read_last(2) == ["1", "2"]


def test_line_longer_than_the_search_is_left_out(follower: LogFollower, path: Path) -> None:
    path.write_bytes(b"x" * (MAX_SEARCH_BYTES + BLOCK_BYTES) + b"\nend\n")
    assert follower.read_last(10) == ["end"]


def test_many_new_lines_are_returned_in_parts(follower: LogFollower, path: Path) -> None:
    append(path, b"")
    follower.read_last(0)
    lines = [str(number) for number in range(READ_BYTES // 4)]
    append(path, "".join(f"{line}\n" for line in lines).encode())
    found: list[str] = []
    while more := follower.read_new():
        assert len(more) < len(lines)
        found += more
    assert found == lines


def test_endless_line_is_split_into_bounded_ones(follower: LogFollower, path: Path) -> None:
    path.write_bytes(b"\xff" * (READ_BYTES * 2))
    follower.read_last(0)
    with path.open("ab") as file:
        file.write(b"\xff" * (READ_BYTES * 2))
    for line in (*follower.read_new(), *follower.read_new()):
        assert len(line) <= MAX_LINE + 1


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain", "plain"),
        (b"\x1b[1;31mred\x1b[0m \x1b[?25lx", "red x"),
        (b"a\x00b\x07c\x9b", "abc\ufffd"),
        ("Ж 中 é".encode(), "Ж 中 é"),
        (b"tab\there", "tab\there"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        ("\u202etxt\u2028".encode(), "txt"),
        (b"Loading:  0%\rLoading: 50%\r", "Loading: 50%"),
        (b"windows\r", "windows"),
        (b"", ""),
    ],
)
def test_line_is_shown_without_control_characters(line: bytes, shown: str) -> None:
    assert printable(line) == shown


@given(st.binary(max_size=200))
def test_no_control_character_is_shown(line: bytes) -> None:
    assert all(c.isprintable() or c == "\t" for c in printable(line))


def test_new_file_with_the_inode_of_the_old_one_is_read_from_its_start(
    follower: LogFollower, path: Path
) -> None:
    append(path, b"1 of the first run\n2 of it\n")
    assert follower.read_last(1) == ["2 of it"]
    # As after two starts between two calls: the first log was deleted, and its inode used again.
    path.write_bytes(b"1 of the third run, with more\n2 of it\n")
    assert follower.read_new() == ["1 of the third run, with more", "2 of it"]
    append(path, b"3\n")
    assert follower.read_new() == ["3"]


def test_rotation_by_an_engine_start_loses_no_line(follower: LogFollower, path: Path) -> None:
    append(path, b"1\n")
    follower.read_last(5)
    append(path, b"2\n")
    path.replace(path.with_suffix(".log.previous"))
    append(path, b"3\n")
    assert [*follower.read_new(), *follower.read_new()] == ["2", "3"]


# The newest lines in memory


def newest(log: EngineLog) -> list[str]:
    """Read the file; return the lines in memory."""
    log.read()
    return log.lines()


def test_missing_file_has_no_recent_lines(path: Path) -> None:
    log = EngineLog(path)
    assert newest(log) == []
    assert newest(log) == []


def test_empty_file_has_no_recent_lines(path: Path) -> None:
    path.touch()
    assert newest(EngineLog(path)) == []


def test_file_created_later_is_read_from_its_start(path: Path) -> None:
    log = EngineLog(path)
    assert newest(log) == []
    append(path, b"one\n")
    assert newest(log) == ["one"]


def test_recent_lines_are_in_order_without_duplicates(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"one\ntwo\n")
    assert newest(log) == ["one", "two"]
    assert newest(log) == ["one", "two"]
    append(path, b"three\n")
    assert newest(log) == ["one", "two", "three"]


def test_empty_lines_are_kept(path: Path) -> None:
    append(path, b"one\n\n\ntwo\n")
    assert newest(EngineLog(path)) == ["one", "", "", "two"]


def test_unfinished_line_is_shown_and_then_completed(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"one\nload")
    assert newest(log) == ["one", "load"]
    assert newest(log) == ["one", "load"]
    append(path, b"ing")
    assert newest(log) == ["one", "loading"]
    append(path, b" done\ntwo\n")
    assert newest(log) == ["one", "loading done", "two"]


def test_character_split_between_two_reads_is_joined(path: Path) -> None:
    log = EngineLog(path)
    word = "é".encode()
    append(path, word[:1])
    newest(log)
    append(path, word[1:] + b"\n")
    assert newest(log) == ["é"]


def test_bytes_that_are_not_utf8_are_replaced(path: Path) -> None:
    append(path, b"a\xffb\n\xfe\x00\n")
    assert newest(EngineLog(path)) == ["a\ufffdb", "\ufffd\x00"]


def test_lines_of_the_new_file_follow_after_rotation(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"old one\nold two\n")
    newest(log)
    path.rename(path.with_suffix(".log.1"))
    append(path, b"new one\n")
    assert newest(log) == ["old one", "old two", "new one"]


def test_larger_new_file_is_read_from_its_start_after_rotation(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"old\n")
    newest(log)
    path.rename(path.with_suffix(".log.1"))
    append(path, b"new one\nnew two\nnew three\n")
    assert newest(log) == ["old", "new one", "new two", "new three"]


def test_recent_lines_are_kept_while_there_is_no_new_file(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"old\n")
    newest(log)
    path.rename(path.with_suffix(".log.1"))
    assert newest(log) == ["old"]
    append(path, b"new\n")
    assert newest(log) == ["old", "new"]


def test_unfinished_line_is_not_joined_with_the_next_file(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"old\ncut")
    newest(log)
    path.rename(path.with_suffix(".log.1"))
    append(path, b"new\n")
    lines = newest(log)
    assert "cutnew" not in lines
    assert lines[-1] == "new"


def test_truncated_file_is_read_from_its_start(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"a long first line\nsecond\n")
    newest(log)
    os.truncate(path, 0)
    append(path, b"new\n")
    assert newest(log) == ["a long first line", "second", "new"]


def test_larger_new_file_with_the_inode_of_the_old_one_is_read_from_its_start(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"old\n")
    assert log.read() == ["old"]
    path.write_bytes(b"new, and longer\n")
    assert log.read() == ["new, and longer"]


def test_only_the_newest_lines_are_kept(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"".join(b"%d\n" % number for number in range(RECENT_LINES + 50)))
    lines = newest(log)
    assert len(lines) == RECENT_LINES
    assert lines[0] == "50"
    assert lines[-1] == str(RECENT_LINES + 49)
    append(path, b"last\n")
    assert newest(log)[0] == "51"
    assert newest(log)[-1] == "last"


def test_only_the_end_of_a_large_log_is_read(path: Path) -> None:
    append(path, b"first\n" + b"x" * (READ_BYTES * 2) + b"\nlast\n")
    lines = newest(EngineLog(path))
    assert lines[-1] == "last"
    assert "first" not in lines
    assert sum(map(len, lines)) <= READ_BYTES


def test_skipping_a_part_of_the_log_does_not_join_lines(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"begin")
    newest(log)
    append(path, b"x" * (READ_BYTES + 100) + b"y\nlast\n")
    lines = newest(log)
    assert lines[-1] == "last"
    assert not any(line.startswith("begin") and line.endswith("y") for line in lines)


def test_endless_line_is_bounded(path: Path) -> None:
    """A progress bar that never writes a newline."""
    log = EngineLog(path)
    for _ in range(4):
        append(path, b"\r 10%" * (READ_BYTES // 5))
        lines = newest(log)
    assert sum(map(len, lines)) <= 2 * READ_BYTES


@pytest.mark.slow
@given(
    pieces=st.lists(st.text("ab\né", max_size=8).map(lambda text: text.encode()), max_size=8),
    reads=st.lists(st.booleans(), min_size=8, max_size=8),
)
@settings(max_examples=100, deadline=None)
def test_lines_are_those_of_the_file_however_often_it_is_read(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], reads: list[bool]
) -> None:
    path = tmp_path_factory.mktemp("log") / "engine.log"
    log = EngineLog(path)
    for piece, read in zip(pieces, reads, strict=False):
        append(path, piece)
        if read:
            newest(log)
    expected = b"".join(pieces).decode().split("\n")
    assert newest(log) == (expected if expected[-1] else expected[:-1])


def test_line_is_returned_once_when_it_is_complete(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"one\ntw")
    assert log.read() == ["one"]
    append(path, b"o\n")
    assert log.read() == ["two"]
    assert log.read() == []
