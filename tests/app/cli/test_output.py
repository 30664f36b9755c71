"""Tables on a pipe and on terminals of any width."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from app.cli.output import Column, plain, print_table

COLUMNS = [
    Column("day"),
    Column("key", long=True),
    *(Column(name, number=True) for name in ("requests", "prompt", "cached", "cost")),
]
ROWS = [
    ["2026-11-21", "the key of a team", "12,345", "1,234,567,890", "1,000", "1,234.5678"],
    ["2026-11-22", "ci", "1", "2", "3", "0.0001"],
]


def shown(width: int, columns: list[Column], rows: list[list[str]]) -> list[str]:
    file = io.StringIO()
    print_table(
        columns, rows, Console(file=file, width=width, force_terminal=True, color_system=None)
    )
    return file.getvalue().splitlines()


def test_wide_terminal_has_one_line_per_row() -> None:
    lines = shown(100, COLUMNS, ROWS)
    assert len(lines) == 3
    assert lines[0].split() == [column.name for column in COLUMNS]
    assert lines[1].split()[0] == "2026-11-21"
    assert [len(line.rstrip()) for line in lines] == [len(lines[0].rstrip())] * 3, "right-aligned"


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_only_long_cells_wrap(width: int) -> None:
    lines = shown(width, COLUMNS, ROWS)
    assert all(len(line.rstrip()) <= width for line in lines)
    words = " ".join(lines).split()
    for row in ROWS:
        assert {cell for cell in row if " " not in cell} <= set(words)


def test_wide_table_continues_with_its_first_column() -> None:
    lines = shown(50, COLUMNS, ROWS)
    heads = [line.split() for line in lines if line.startswith("day")]
    assert len(heads) > 1
    assert [head[0] for head in heads] == ["day"] * len(heads)
    assert [name for head in heads for name in head[1:]] == [c.name for c in COLUMNS[1:]]


def test_markup_is_text() -> None:
    assert shown(80, [Column("a")], [["[red]x[/red]"]])[1].rstrip() == "[red]x[/red]"


def test_cell_has_the_style_of_its_column() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard")
    column = Column("state", style=lambda cell: {"ready": "green"}.get(cell, ""))
    print_table([column], [["ready"], ["stopped"]], console)
    assert "\x1b[32mready" in file.getvalue()
    assert "\x1b[32mstopped" not in file.getvalue()


def test_table_on_a_pipe_is_not_truncated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table(COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split("  ")) > 1 for line in lines] == [True] * 3
    assert "the key of a team" in lines[1]


@given(st.lists(st.lists(st.text("ab ", max_size=9), min_size=3, max_size=3), max_size=4))
def test_plain_lines_have_no_trailing_spaces(rows: list[list[str]]) -> None:
    lines = plain(("a", "b", "c"), rows).split("\n")
    assert len(lines) == len(rows) + 1
    assert all(line == line.rstrip() for line in lines)
