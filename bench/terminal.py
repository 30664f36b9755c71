"""Tables on the terminal."""

import rich.table
from rich.console import Console

from bench.report import Table

# Width for a pipe or a file, which have none.
WIDTH = 140


def show(table: Table) -> None:
    """Print a table on standard output."""
    shown = rich.table.Table(title=table.title, title_justify="left")
    for index, name in enumerate(table.columns):
        shown.add_column(name, justify="right" if index else "left")
    for row in table.rows:
        shown.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(shown, "")
