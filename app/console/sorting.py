"""Tables whose headings sort by links: the column is in the address, without scripts. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

Row = TypeVar("Row")
# A number or a text of a row; None stands last in both directions.
Value = float | str | None


@dataclass(frozen=True, slots=True)
class Sorting(Generic[Row]):
    """The order of a table. `chosen` is a column; with `-` before it, the largest is first.

    Every other text, such as the empty one, leaves the rows as they are.
    """

    page: str  # its path
    columns: Mapping[str, Callable[[Row], Value]]
    chosen: str = ""

    @property
    def _column(self) -> str:
        return self.chosen.removeprefix("-")

    def order(self, column: str) -> str:
        """Return the `aria-sort` of a column; empty: another one sorts."""
        if column != self._column:
            return ""
        return "descending" if self.chosen.startswith("-") else "ascending"

    def path(self, column: str) -> str:
        """Return the path that sorts by a column, the other way round if it does so now."""
        sort = f"-{column}" if self.order(column) == "ascending" else column
        return f"{self.page}?{urlencode({'sort': sort})}"

    def sorted(self, rows: Iterable[Row]) -> Sequence[Row]:
        """Return rows in the order."""
        read = self.columns.get(self._column)
        if read is None:
            return list(rows)
        known: list[tuple[Any, Row]] = []
        unknown: list[Row] = []
        for row in rows:
            value = read(row)
            if value is None:
                unknown.append(row)
            else:
                known.append((value.casefold() if isinstance(value, str) else value, row))
        known.sort(key=lambda one: one[0], reverse=self.chosen.startswith("-"))
        return [*(row for _, row in known), *unknown]
