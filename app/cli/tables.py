"""Tables of the commands: whole lines on a pipe, and what fits on a terminal.

On a terminal a table that is too wide continues below, with the columns repeated that say what a
row is about: no cell is cut, and only text that may be long is broken over lines.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import, and other commands need not wait
    from rich.console import Console
    from rich.table import Table

GAP = 2  # blanks between two columns
# Below this a column of text is more folds than words.
NARROWEST = 20


def no_style(_: str) -> str:
    """Return the style of a cell that has none."""
    return ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    number: bool = False  # stands at the right
    long: bool = False  # may be broken over lines where room is scarce
    style: Callable[[str], str] = no_style  # of a cell on a terminal


def print_table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    console: "Console | None" = None,
    *,
    names: int = 1,
) -> None:
    """Print a table to standard output; `console` says what that is.

    The first `names` columns say what a row is about.
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


def plain(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table for a pipe: as wide as it is, nothing cut, nothing at the end of a line."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def tables(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, names: int = 1
) -> "Iterator[Table]":
    """Yield the tables that show all columns on a terminal of this width."""
    from rich.table import Table
    from rich.text import Text

    cells = zip([column.name for column in columns], *rows, strict=True)
    needed = [_needed(c, max(map(len, cs))) for c, cs in zip(columns, cells, strict=True)]
    before = sum(needed[:names]) + GAP * names
    for group in _groups(needed, width, names):
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
        for place in group:
            column = columns[place]
            # What is wider than the terminal has to be broken.
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
    """Yield the columns of each table; the first `names` columns stand in all of them."""
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
