"""Output of the commands: text that is safe on a terminal, JSON, and tables.

A table has whole lines on a pipe, and is fitted to the width of a terminal. One that is too wide
continues below with its first columns repeated. No cell is truncated, and only text that may be
long wraps.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # slow to import
    from rich.console import Console
    from rich.table import Table

GAP = 2  # spaces between two columns
# In a narrower column, text would wrap at every word.
NARROWEST = 20


def no_style(_: str) -> str:
    """Return the default style of a cell."""
    return ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    number: bool = False  # aligned to the right
    long: bool = False  # wraps where the terminal is narrow
    style: Callable[[str], str] = no_style  # of a cell on a terminal


def print_table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    console: "Console | None" = None,
    *,
    names: int = 1,
) -> None:
    """Print a table on a console, standard output by default.

    The first `names` columns identify a row.
    """
    from rich.console import Console

    rows = list(rows)
    console = console or Console()
    if not console.is_terminal:
        print(plain([column.name for column in columns], rows))
        return
    for number, table in enumerate(tables(columns, rows, console.width, names)):
        if number:
            console.print()
        console.print(table)


def print_fields(fields: Sequence[tuple[str, str]]) -> None:
    """Print names and values, one pair per line."""
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        print(f"{name.replace('_', ' '):<{width}}  {value}".rstrip())


def plain(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table for a pipe: not truncated, without trailing spaces."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def tables(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, names: int = 1
) -> "Iterator[Table]":
    """Yield the tables that together show all columns on a terminal of this width."""
    from rich.table import Table
    from rich.text import Text

    cells = zip([column.name for column in columns], *rows, strict=True)
    needed = [_needed(c, max(map(len, cs))) for c, cs in zip(columns, cells, strict=True)]
    before = sum(needed[:names]) + GAP * names
    for group in _groups(needed, width, names):
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
        for place in group:
            column = columns[place]
            # A column wider than the terminal has to wrap.
            fits = needed[place] + (before if place >= names else before - needed[place]) <= width
            table.add_column(
                column.name,
                justify="right" if column.number else "left",
                overflow="fold",
                min_width=needed[place] if fits else None,
                no_wrap=fits and not column.long,
            )
        for row in rows:
            table.add_row(*(Text(row[i], columns[i].style(row[i])) for i in group))
        yield table


def _needed(column: Column, longest: int) -> int:
    return min(longest, NARROWEST) if column.long else longest


def _groups(needed: Sequence[int], width: int, names: int) -> Iterator[list[int]]:
    """Yield the columns of each table; the first `names` columns are in all of them."""
    first = list(range(names))
    begin = sum(needed[:names]) + GAP * (names - 1)
    group, used = first[:], begin
    for place in range(names, len(needed)):
        more = GAP + needed[place]
        if len(group) > names and used + more > width:
            yield group
            group, used = first[:], begin
        group.append(place)
        used += more
    yield group


def printable(text: str, kept: str = "") -> str:
    """Return text without characters that control a terminal; those in `kept` stay."""
    return "".join(c if c.isprintable() or c in kept else "\ufffd" for c in text)


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    print_json_text(msgspec.json.encode(value))


def print_json_text(text: bytes) -> None:
    """Print a JSON text, indented."""
    print(msgspec.json.format(text, indent=2).decode())
