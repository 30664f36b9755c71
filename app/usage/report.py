"""Usage reports from the daily sums, grouped by any of day, owner, key and model.

A request is in a report as soon as its batch is written, a quarter of a second after its end.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import ColumnElement, FromClause, func, literal, select, union_all

from app.database import Database, Lane
from app.database.schema import USAGE_SUMS, api_keys, usage_by_owner, usage_daily
from app.usage.statements import cost_of, cost_sums

GROUPS = ("day", "owner", "key", "model")
_COLUMNS = {"day": "day", "owner": "owner", "key": "key_id", "model": "model"}
_SUMS = tuple(name for name in USAGE_SUMS if name != "cost_nano")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """The sums of one group; fields that are not grouped by are None."""

    day: str | None
    key_id: str | None
    key_name: str | None  # None also for an unknown key
    model: str | None
    requests: int
    estimated_requests: int  # requests whose tokens the gateway estimated
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cost_nano: int  # in 1/1,000,000,000 of the currency
    # The key's owner at the time of use; empty: none.
    owner: str | None = None


async def usage_report(
    database: Database,
    by: Collection[str],
    since: date,
    until: date,
    key_id: str | None = None,
    limit: int | None = None,
    owner: str | None = None,
    model: str | None = None,
    *,
    largest_first: bool = False,
) -> list[UsageRow]:
    """Return the sums of the UTC days `since` to `until`, both included, in order of the groups.

    `by`: some of GROUPS. `key_id`: only this key. `owner`: only this owner; empty: only keys
    without one. `model`: only this model. `limit`: only the first rows. `largest_first`: the newest
    day first, and in it, or of all, the row with the most tokens. Raises DatabaseError.
    """
    first, last = since.isoformat(), until.isoformat()
    source: FromClause = usage_daily
    if owner is not None or "owner" in by:
        source = _by_owner(first, last)
    groups = [source.c[_COLUMNS[name]].label(name) for name in GROUPS if name in by]
    sums = (
        *(func.sum(source.c[name]).label(name) for name in _SUMS),
        *cost_sums(source.c.cost_nano),
    )
    summed = select(*groups, *sums).where(source.c.day.between(first, last)).group_by(*groups)
    for name, wanted in (("key_id", key_id), ("owner", owner), ("model", model)):
        if wanted is not None:
            summed = summed.where(source.c[name] == wanted)
    table = summed.having(func.sum(source.c.requests) > 0).subquery()
    order: list[ColumnElement[Any]] = [table.c[group.name] for group in groups]
    if largest_first:
        newest = [table.c.day.desc()] if "day" in by else []
        order = [*newest, (table.c.prompt_tokens + table.c.completion_tokens).desc(), *order]
    statement: Any = select(table).order_by(*order).limit(limit)
    if "key" in by:
        named = table.outerjoin(api_keys, api_keys.c.id == table.c.key)
        statement = statement.add_columns(api_keys.c.name.label("key_name")).select_from(named)
    async with database.read(Lane.REPORTS) as connection:
        rows = (await connection.execute(statement)).all()
    return [_row(row) for row in rows]


def _by_owner(first: str, last: str) -> FromClause:
    """Return the daily sums of all keys, by owner.

    Usage without an owner is `usage_daily` minus `usage_by_owner`.
    """
    owned, every = usage_by_owner.c, usage_daily.c
    none: ColumnElement[str] = literal("").label("owner")
    parts = (
        select(owned.owner, owned.day, owned.key_id, owned.model, *(owned[n] for n in USAGE_SUMS)),
        select(none, every.day, every.key_id, every.model, *(every[n] for n in USAGE_SUMS)),
        select(
            none, owned.day, owned.key_id, owned.model, *((-owned[n]).label(n) for n in USAGE_SUMS)
        ),
    )
    return union_all(
        *(part.where(part.selected_columns.day.between(first, last)) for part in parts)
    ).subquery()


def _row(row: Any) -> UsageRow:
    found = row._mapping
    return UsageRow(
        day=found.get("day"),
        key_id=found.get("key"),
        key_name=found.get("key_name"),
        model=found.get("model"),
        cost_nano=cost_of(row),
        owner=found.get("owner"),
        **{name: int(found[name]) for name in _SUMS},
    )
