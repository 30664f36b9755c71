"""The alerts in the database: made once, claimed by one gateway at a time, sent or given up."""

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, case, delete, func, select, update

from app.database import Database, dialect_insert
from app.database.schema import api_keys, budget_alerts, usage_by_owner, usage_daily
from app.usage.alerts.message import Alert
from app.usage.records import kept
from app.usage.spending import Period, Spent, Subject

# How long one gateway has for one attempt before another may send the same.
LEASE_MS = 60_000
# Longer than the longest period: a row that is gone could be made again.
KEPT_MS = 63 * 86_400_000

_KEY = tuple(budget_alerts.primary_key.columns)
# Where the sums of each kind of account are, and how long its name may be there.
_SUMS: Mapping[Subject, tuple[Any, int]] = {
    "key": (usage_daily.c.key_id, 64),
    "owner": (usage_by_owner.c.owner, 200),
}


@dataclass(frozen=True, slots=True)
class Reached:
    """A share of a budget that was reached; the fields before `used` say which, for good."""

    subject: Subject
    name: str
    period: Period
    day: str
    budget: int
    permille: int
    used: int


class Outbox:
    """Alerts as rows. Every method raises DatabaseUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def spent(self, subject: Subject, names: Collection[str], day: str) -> dict[str, Spent]:
        """Return what accounts have spent on a day and in its month, as far as it is written."""
        column, longest = _SUMS[subject]
        table = column.table
        tokens = table.c.prompt_tokens + table.c.completion_tokens
        today = func.sum(case((table.c.day == day, tokens), else_=0))
        written = {kept(name, longest): name for name in names}
        statement = (
            select(column, today, func.sum(tokens))
            .where(column.in_(list(written)), table.c.day.between(f"{day[:7]}-01", day))
            .group_by(column)
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(statement)).all()
        return {written[name]: Spent(int(on_day), int(month)) for name, on_day, month in rows}

    async def add(self, reached: Iterable[Reached], now_ms: int) -> None:
        """Make an alert of each share that has none yet."""
        rows = [
            {
                "subject": one.subject,
                "name": kept(one.name, 200),
                "period": one.period,
                "day": one.day,
                "budget": one.budget,
                "permille": one.permille,
                "id": f"msg_{secrets.token_urlsafe(18)}",
                "used": one.used,
                "at_ms": now_ms,
                "attempts": 0,
                "due_ms": now_ms,
            }
            for one in reached
        ]
        # In one order everywhere: gateways that add the same must not lock each other out.
        rows.sort(key=lambda row: tuple(str(row[column.name]) for column in _KEY))
        if not rows:
            return
        statement: Any = dialect_insert(budget_alerts, self._database.dialect)
        async with self._database.write() as connection:
            await connection.execute(statement.on_conflict_do_nothing(), rows)

    async def claim(self, now_ms: int, most: int) -> list[Alert]:
        """Return alerts that are due, which no other gateway sends before their lease ends."""
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
                    claimed.append(_alert(row))
        return claimed

    async def settle(self, webhook_id: str, due_ms: int | None) -> None:
        """Note when a claimed alert is due again; None: never, it was delivered or given up."""
        async with self._database.write() as connection:
            await connection.execute(
                update(budget_alerts).where(_is(webhook_id)).values(due_ms=due_ms)
            )

    async def release(self, webhook_ids: Sequence[str], now_ms: int) -> None:
        """Have claimed alerts be due at once: this gateway does not send them."""
        async with self._database.write() as connection:
            claimed = budget_alerts.c.id.in_(list(webhook_ids))
            await connection.execute(update(budget_alerts).where(claimed).values(due_ms=now_ms))

    async def delete_old(self, now_ms: int) -> None:
        """Delete alerts whose period is long over."""
        old = budget_alerts.c.at_ms < now_ms - KEPT_MS
        async with self._database.write() as connection:
            await connection.execute(delete(budget_alerts).where(old))


def _is(webhook_id: str) -> ColumnElement[bool]:
    return budget_alerts.c.id == webhook_id


def _alert(row: Mapping[Any, Any]) -> Alert:
    return Alert(
        id=row["id"],
        subject=row["subject"],
        name=row["name"],
        period=row["period"],
        day=row["day"],
        budget=row["budget"],
        permille=row["permille"],
        used=row["used"],
        at_ms=row["at_ms"],
        attempts=row["attempts"] + 1,
        key_name=row["key_name"],
        owner=row["owner"],
    )
