"""The table of alerts: inserted once, claimed by one gateway at a time, delivered or abandoned."""

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, delete, select, update

from app.database import Database, dialect_insert
from app.database.schema import api_keys, budget_alerts
from app.usage.alerts.message import Alert
from app.usage.records import storable
from app.usage.spending import BudgetSubject, Measure, Period

# How long one gateway has for one attempt before another may send the same.
LEASE_MS = 60_000
# Longer than the longest period: a row that is gone could be made again.
RETENTION_MS = 63 * 86_400_000

_KEY = tuple(budget_alerts.primary_key.columns)


class Reached(NamedTuple):
    """A reached share of a budget; the fields before `used` identify it."""

    subject: BudgetSubject
    name: str
    period: Period
    day: str
    measure: Measure
    budget: int
    permille: int
    used: int


class Outbox:
    """Inserts, claims and settles alerts. Every method raises DatabaseError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, reached: Iterable[Reached], now_ms: int) -> None:
        """Insert an alert for each share that has none yet."""
        rows = [
            {
                **one._asdict(),
                "name": storable(one.name, 200),
                "id": f"msg_{secrets.token_urlsafe(18)}",
                "at_ms": now_ms,
                "attempts": 0,
                "due_ms": now_ms,
            }
            for one in reached
        ]
        # Always in the same order, so that two gateways cannot deadlock.
        rows.sort(key=lambda row: tuple(str(row[column.name]) for column in _KEY))
        if not rows:
            return
        statement: Any = dialect_insert(budget_alerts, self._database.dialect)
        async with self._database.write() as connection:
            await connection.execute(statement.on_conflict_do_nothing(), rows)

    async def claim(self, now_ms: int, most: int) -> list[Alert]:
        """Claim alerts that are due; no other gateway sends them before the lease ends."""
        due = (
            select(*budget_alerts.c, api_keys.c.name.label("key_name"), api_keys.c.owner)
            .join(
                api_keys,
                and_(budget_alerts.c.subject == "key", api_keys.c.id == budget_alerts.c.name),
                isouter=True,
            )
            .where(budget_alerts.c.due_ms <= now_ms)
            .order_by(budget_alerts.c.due_ms, *_KEY)
            .limit(most)
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(due)).mappings().all()
        if not rows:
            return []
        claimed: list[Alert] = []
        async with self._database.write() as connection:
            for row in sorted(rows, key=lambda row: str(row["id"])):
                mine = and_(_is(row["id"]), budget_alerts.c.due_ms == row["due_ms"])
                taken = {"due_ms": now_ms + LEASE_MS, "attempts": row["attempts"] + 1}
                done = await connection.execute(update(budget_alerts).where(mine).values(taken))
                if done.rowcount == 1:
                    # Every column but the time when it is due.
                    fields = {name: value for name, value in row.items() if name != "due_ms"}
                    claimed.append(Alert(**{**fields, "attempts": row["attempts"] + 1}))
        return claimed

    async def settle(self, webhook_id: str, due_ms: int | None) -> None:
        """Set when a claimed alert is due again; None: never, it was delivered or abandoned."""
        async with self._database.write() as connection:
            await connection.execute(
                update(budget_alerts).where(_is(webhook_id)).values(due_ms=due_ms)
            )

    async def release(self, webhook_ids: Sequence[str], now_ms: int) -> None:
        """Make claimed alerts due at once: this gateway does not send them."""
        async with self._database.write() as connection:
            claimed = budget_alerts.c.id.in_(list(webhook_ids))
            await connection.execute(update(budget_alerts).where(claimed).values(due_ms=now_ms))

    async def delete_old(self, now_ms: int) -> None:
        """Delete alerts of past periods."""
        old = budget_alerts.c.at_ms < now_ms - RETENTION_MS
        async with self._database.write() as connection:
            await connection.execute(delete(budget_alerts).where(old))


def _is(webhook_id: str) -> ColumnElement[bool]:
    return budget_alerts.c.id == webhook_id
