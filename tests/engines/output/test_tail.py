"""A log read from its end and on, whatever is in it and whatever becomes of the file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.output.tail import BACK_BYTES, BLOCK_BYTES, LONGEST_LINE, READ_BYTES, Tail, clean


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


@pytest.fixture
def tail(path: Path) -> Iterator[Tail]:
    tail = Tail(path)
    yield tail
    tail.close()


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_the_last_lines_then_what_comes(tail: Tail, path: Path) -> None:
    add(path, "1\n2\n3\n")
    assert tail.last(2) == ["2", "3"]
    assert tail.more() == []
    add(path, "4\nfi")
    assert tail.more() == ["4"]
    add(path, "ve\n")
    assert tail.more() == ["five"]


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_as_many_as_asked_for(tail: Tail, path: Path, count: int) -> None:
    add(path, "1\n2\n3\n")
    assert tail.last(count) == ["1", "2", "3"][3 - min(count, 3) :]


def test_a_line_without_an_end_is_told_apart(tail: Tail, path: Path) -> None:
    add(path, "1\nhalf")
    assert tail.last(5) == ["1"]
    assert tail.rest() == ["half"]
    assert tail.rest() == []


def test_a_file_that_comes_later(tail: Tail, path: Path) -> None:
    assert tail.last(5) == []
    assert tail.more() == []
    add(path, "1\n")
    assert tail.more() == ["1"]


def test_a_rotation_loses_no_line(tail: Tail, path: Path) -> None:
    add(path, "1\n")
    assert tail.last(5) == ["1"]
    add(path, "2\nhalf")
    path.replace(path.with_suffix(".log.1"))
    assert tail.more() == ["2"]
    assert tail.more() == [], "the new file is not there yet"
    add(path, "3\n")
    found: list[str] = []
    for _ in range(3):
        found += tail.more()
    assert found == ["half", "3"]


def test_a_file_that_was_emptied_begins_anew(tail: Tail, path: Path) -> None:
    add(path, "1\n2\n3\n")
    tail.last(5)
    path.write_text("")
    assert tail.more() == []
    add(path, "4\n")
    assert tail.more() == ["4"]


def test_a_large_file_is_read_from_its_end_alone(tail: Tail, path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing
        file.seek(0, 2)
        file.write(b"\n1\n2\n")
    assert tail.last(2) == ["1", "2"]


def test_lines_longer_than_is_looked_back_for_are_left_out(tail: Tail, path: Path) -> None:
    path.write_bytes(b"x" * (BACK_BYTES + BLOCK_BYTES) + b"\nend\n")
    assert tail.last(10) == ["end"]


def test_much_that_is_new_comes_in_pieces(tail: Tail, path: Path) -> None:
    add(path, "")
    tail.last(0)
    lines = [str(number) for number in range(READ_BYTES // 4)]
    add(path, "\n".join(lines) + "\n")
    found: list[str] = []
    while more := tail.more():
        assert len(more) < len(lines)
        found += more
    assert found == lines


def test_a_line_without_end_is_cut_into_bounded_ones(tail: Tail, path: Path) -> None:
    path.write_bytes(b"\xff" * (READ_BYTES * 2))
    tail.last(0)
    with path.open("ab") as file:
        file.write(b"\xff" * (READ_BYTES * 2))
    for line in (*tail.more(), *tail.more()):
        assert len(line) <= LONGEST_LINE + 1


def test_after_it_was_closed_nothing_is_open(path: Path) -> None:
    add(path, "1\n")
    tail = Tail(path)
    tail.last(1)
    tail.close()
    assert tail.more() == []


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
def test_what_a_terminal_may_show(line: bytes, shown: str) -> None:
    assert clean(line) == shown


@given(st.binary(max_size=200))
def test_nothing_that_steers_a_terminal_comes_through(line: bytes) -> None:
    assert all(c.isprintable() or c == "\t" for c in clean(line))
