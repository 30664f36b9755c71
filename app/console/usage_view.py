"""Usage as pages show it: totals, a chart of the days, and the table."""

from calendar import monthrange
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date, datetime, timedelta

from app.console.bars import BarChart, bar_chart
from app.console.language import gettext
from app.csv_text import csv_table
from app.usage import UsageRow

# As `vllm-gateway usage --csv` has them.
_CSV = (
    "day", "key_id", "key_name", "model", "requests", "estimated_requests", "prompt_tokens",
    "cached_tokens", "completion_tokens", "reasoning_tokens", "total_tokens", "cost", "owner",
)  # fmt: skip
_NANO = 1e9
# Days that a chart has at least.
WEEK = 7


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


@dataclass(frozen=True, slots=True)
class DaysChart:
    """Bars of the days of a period, and the names of their parts."""

    bars: BarChart
    names: Sequence[str]
    # In nano of the currency, not in tokens.
    money: bool = False


def first_day(days: Iterable[UsageRow], since: date, until: date) -> date:
    """Return where a chart begins: with the first usage, or a week before the end."""
    first = min((row.day for row in days if row.day), default=None)
    if first is None:
        return since
    return max(since, min(date.fromisoformat(first), until - timedelta(days=WEEK - 1)))


def stacked_chart(
    total: Iterable[UsageRow],
    groups: Mapping[str, Sequence[UsageRow]],
    since: date,
    until: date,
    *,
    money: bool,
) -> DaysChart:
    """Return the days of a period by group, the rest as `others`; rows are grouped by day."""

    def amounts(rows: Iterable[UsageRow]) -> dict[str, int]:
        return {
            row.day or "": row.cost_nano if money else row.prompt_tokens + row.completion_tokens
            for row in rows
        }

    parts = [amounts(rows) for rows in groups.values()]
    by_day: dict[str, tuple[int, ...]] = {}
    for day, amount in amounts(total).items():
        found = tuple(part.get(day, 0) for part in parts)
        by_day[day] = (*found, max(amount - sum(found), 0))
    names = [*groups, gettext("others")]
    if not any(found[-1] for found in by_day.values()):
        names.pop()
        by_day = {day: found[:-1] for day, found in by_day.items()}
    return DaysChart(bar_chart(by_day, len(names), since, until), names, money)


def forecast(so_far: float, moment: datetime) -> float:
    """Return what a month that began with the day 1 of `moment` will have had at its end."""
    days = monthrange(moment.year, moment.month)[1]
    passed = (moment - moment.replace(day=1, hour=0, minute=0, second=0)) / timedelta(days=1)
    return so_far * days / max(passed, 1e-6)


def chart_of(rows: Iterable[UsageRow], since: date, until: date) -> DaysChart:
    """Return the prompt and generated tokens of each day; the rows are grouped by day at least."""
    by_day: dict[str, tuple[int, int]] = {}
    for row in rows:
        if row.day is not None:
            prompt, generated = by_day.get(row.day, (0, 0))
            by_day[row.day] = prompt + row.prompt_tokens, generated + row.completion_tokens
    return DaysChart(bar_chart(by_day, 2, since, until), (gettext("prompt"), gettext("generated")))


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
