"""What keys and owners with a budget have used of it, from the daily sums.

A request counts as soon as its batch is written, a quarter of a second after its end; reservations
of requests in flight do not count.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.sql import Select

from app.database import Database, Lane
from app.database.schema import api_keys, owners
from app.usage.spending import BudgetSubject
from app.usage.statements import ACCOUNT_COLUMNS, cost_of, spent_by_account


@dataclass(frozen=True, slots=True)
class BudgetUse:
    """The budgets of a key or an owner, and what is used of them. None: no budget.

    In tokens, and in nano of the currency.
    """

    subject: BudgetSubject
    id: str  # of the key; an owner's is its name
    name: str
    daily: int | None
    monthly: int | None
    daily_cost_nano: int | None = None
    monthly_cost_nano: int | None = None
    used_today: int = 0
    used_this_month: int = 0
    cost_today_nano: int = 0
    cost_this_month_nano: int = 0

    @property
    def share(self) -> float:
        """The used part of the tighter budget, above 1 if it is overshot."""
        used = (
            (self.used_today, self.daily),
            (self.used_this_month, self.monthly),
            (self.cost_today_nano, self.daily_cost_nano),
            (self.cost_this_month_nano, self.monthly_cost_nano),
        )
        return max(
            (spent / budget if budget else 1.0 for spent, budget in used if budget is not None),
            default=0.0,
        )


async def budget_report(
    database: Database, today: date, limit: int, owner: str | None = None
) -> list[BudgetUse]:
    """Return budgets of keys and owners on a UTC day, the most used first; of one owner, or of all.

    Up to `limit` keys and as many owners are read. Raises DatabaseError.
    """
    queries: dict[BudgetSubject, Select[Any]] = {
        "key": _query("key", today, api_keys.c.id, api_keys.c.name).where(
            api_keys.c.deleted_ms.is_(None)
        ),
        "owner": _query("owner", today, owners.c.name, owners.c.name.label("title")),
    }
    if owner is not None:
        queries["key"] = queries["key"].where(api_keys.c.owner == owner)
        queries["owner"] = queries["owner"].where(owners.c.name == owner)
    found: list[BudgetUse] = []
    async with database.read(Lane.REPORTS) as connection:
        for subject, query in queries.items():
            rows = await connection.execute(query.limit(limit))
            found += [_budget_use(subject, row) for row in rows]
    return sorted(found, key=lambda one: (-one.share, one.name))


async def key_budgets(
    database: Database, today: date, key_ids: Collection[str]
) -> dict[str, BudgetUse]:
    """Return the budgets of some keys on a UTC day, by ID; not of those without any.

    Raises DatabaseError.
    """
    query = _query("key", today, api_keys.c.id, api_keys.c.name, key_ids)
    async with database.read(Lane.REPORTS) as connection:
        rows = await connection.execute(query.where(api_keys.c.id.in_(key_ids)))
        return {row.id: _budget_use("key", row) for row in rows}


def _budget_use(subject: BudgetSubject, row: Any) -> BudgetUse:
    tokens = (int(row.of_day or 0), int(row.of_month or 0))
    return BudgetUse(subject, *(*row[:6], *tokens, cost_of(row, "day"), cost_of(row, "month")))


def _query(
    subject: BudgetSubject, today: date, id_: Any, name: Any, ids: Collection[str] | None = None
) -> Select[Any]:
    """Return the query of all accounts of a kind that have a budget; what `ids` spent, or all."""
    spending = spent_by_account(subject, today.isoformat())
    if ids is not None:
        spending = spending.where(ACCOUNT_COLUMNS[subject][0].in_(ids))
    table, spent = id_.table, spending.subquery()
    budgets = [
        table.c[name]
        for name in ("daily_tokens", "monthly_tokens", "daily_cost_nano", "monthly_cost_nano")
    ]
    _, *used = spent.c
    return (
        select(id_, name, *budgets, *used)
        .select_from(table.outerjoin(spent, spent.c.account == id_))
        .where(or_(*(budget.is_not(None) for budget in budgets)))
        .order_by(spent.c.of_month.desc().nulls_last(), id_)
    )
