"""What was used, from the daily sums: by key, model and day, or any of them.

A record is in a report as soon as its batch is written, a quarter of a second after the request.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import func, select

from app.database.database import Database
from app.database.schema import api_keys, usage_daily

GROUPS = ("day", "key", "model")
_COLUMNS = {
    "day": usage_daily.c.day,
    "key": usage_daily.c.key_id,
    "model": usage_daily.c.model,
}
_SUMS = (
    usage_daily.c.requests,
    usage_daily.c.estimated_requests,
    usage_daily.c.prompt_tokens,
    usage_daily.c.cached_tokens,
    usage_daily.c.completion_tokens,
    usage_daily.c.reasoning_tokens,
)
_NANO = 10**9


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Sums of one group; what it is not grouped by is None."""

    day: str | None
    key_id: str | None
    key_name: str | None  # None also where no key of that id is known
    model: str | None
    requests: int
    estimated_requests: int  # those whose tokens the gateway had to estimate
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cost_nano: int  # in 1/1,000,000,000 of the currency


async def usage_report(
    database: Database,
    by: Collection[str],
    since: date,
    until: date,
    key_id: str | None = None,
    limit: int | None = None,
) -> list[UsageRow]:
    """Return the sums of the UTC days `since` to `until`, both included, in order of the groups.

    `by`: some of GROUPS. `key_id`: of this key alone. `limit`: the first rows alone. Raises
    DatabaseUnavailable.
    """
    groups = [_COLUMNS[name].label(name) for name in GROUPS if name in by]
    cost = usage_daily.c.cost_nano
    sums = (
        *(func.sum(column).label(column.name) for column in _SUMS),
        # In two parts, neither of which can grow out of 64 bits.
        func.sum(cost // _NANO).label("cost_whole"),
        func.sum(cost % _NANO).label("cost_part"),
    )
    days = usage_daily.c.day.between(since.isoformat(), until.isoformat())
    summed = select(*groups, *sums).where(days).group_by(*groups)
    if key_id is not None:
        summed = summed.where(usage_daily.c.key_id == key_id)
    table = summed.having(func.count() > 0).subquery()
    statement: Any = select(table).order_by(*(table.c[group.name] for group in groups)).limit(limit)
    if "key" in by:
        named = table.outerjoin(api_keys, api_keys.c.id == table.c.key)
        statement = statement.add_columns(api_keys.c.name.label("key_name")).select_from(named)
    async with database.read() as connection:
        rows = (await connection.execute(statement)).mappings().all()
    return [_row(dict(row)) for row in rows]


def _row(row: dict[str, Any]) -> UsageRow:
    sums = {column.name: int(row[column.name]) for column in _SUMS}
    return UsageRow(
        day=row.get("day"),
        key_id=row.get("key"),
        key_name=row.get("key_name"),
        model=row.get("model"),
        cost_nano=int(row["cost_whole"]) * _NANO + int(row["cost_part"]),
        **sums,
    )
