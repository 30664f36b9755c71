"""What keys and owners with a budget have used of it, from the daily sums.

A request counts as soon as its batch is written, a quarter of a second after its end; reservations
of requests in flight do not count.
"""

from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.sql import Select

from app.database import Database, Lane
from app.database.schema import api_keys, owners
from app.money import NANO
from app.usage.spending import BudgetSubject
from app.usage.statements import spent_by_account


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
            for row in await connection.execute(query.limit(limit)):
                of_day, of_month, *costs = (int(one or 0) for one in row[6:])
                spent = (costs[0] * NANO + costs[1], costs[2] * NANO + costs[3])
                found.append(BudgetUse(subject, *(*row[:6], of_day, of_month, *spent)))
    return sorted(found, key=lambda one: (-one.share, one.name))


def _query(subject: BudgetSubject, today: date, id_: Any, name: Any) -> Select[Any]:
    """Return the query of all accounts of a kind that have a budget."""
    table, spent = id_.table, spent_by_account(subject, today.isoformat()).subquery()
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
