"""Usage as pages show it: totals, a chart of the days, and the table. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date

from app.console.bars import BarChart, bar_chart
from app.csv_text import csv_table
from app.usage import UsageRow

# As `vllm-gateway usage --csv` has them.
_CSV = (
    "day", "key_id", "key_name", "model", "requests", "estimated_requests", "prompt_tokens",
    "cached_tokens", "completion_tokens", "reasoning_tokens", "total_tokens", "cost", "owner",
)  # fmt: skip
_NANO = 1e9


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of some rows."""

    requests: int = 0
    estimated_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_nano: int = 0  # in 1/1,000,000,000 of the currency

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens: what budgets count."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def cached_share(self) -> float | None:
        """The share of the prompts' tokens that came from a cache; None: there were none."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


def totals_of(rows: Iterable[UsageRow]) -> Totals:
    """Return the sums of rows."""
    found = list(rows)
    return Totals(*(sum(getattr(row, one.name) for row in found) for one in fields(Totals)))


def chart_of(rows: Iterable[UsageRow], since: date, until: date) -> BarChart:
    """Return the prompt and generated tokens of each day; the rows are grouped by day at least."""
    by_day: dict[str, tuple[int, int]] = {}
    for row in rows:
        if row.day is not None:
            prompt, generated = by_day.get(row.day, (0, 0))
            by_day[row.day] = prompt + row.prompt_tokens, generated + row.completion_tokens
    return bar_chart(by_day, 2, since, until)


def days_of(rows: Iterable[UsageRow], since: date) -> list[UsageRow]:
    """Return the rows of a day and those after it."""
    first = since.isoformat()
    return [row for row in rows if (row.day or "") >= first]


def values_of(row: UsageRow) -> Mapping[str, str]:
    """Return a row's values by group; those of groups that it does not have are empty."""
    return {
        "day": row.day or "",
        "owner": row.owner or "",
        "key": row.key_id or "",
        "model": row.model or "",
    }


def csv_of(rows: Sequence[UsageRow]) -> str:
    """Return rows as CSV."""
    return csv_table(_CSV, ([_csv_value(row, name) for name in _CSV] for row in rows))


def _csv_value(row: UsageRow, name: str) -> object:
    match name:
        case "total_tokens":
            return row.prompt_tokens + row.completion_tokens
        case "cost":
            return row.cost_nano / _NANO
        case _:
            return getattr(row, name)
