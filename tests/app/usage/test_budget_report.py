"""Budgets and what is used of them, on both databases."""

from datetime import date

from sqlalchemy import insert

from app.database import Database
from app.database.schema import api_keys, owners
from app.usage import Usage, budget_report, key_budgets
from tests.app.usage.records import Clock, ledger_for, record

TODAY = date(2026, 11, 21)


async def add_key(database: Database, key_id: str, **fields: object) -> None:
    row = {
        "id": key_id, "name": f"name of {key_id}", "owner": "", "role": "client", "models": ["*"],
        "priority": 0, "weight": 1, "disabled": False, "created_ms": 0, "revision": 1, **fields,
    }  # fmt: skip
    async with database.write() as connection:
        await connection.execute(insert(api_keys), [row])


async def spend(database: Database, at: str, key_id: str, tokens: int, owner: str = "") -> None:
    ledger = ledger_for(database, clock=Clock(at))
    ledger.end(*record(key_id=key_id, usage=Usage(tokens - 1, 1), owner=owner))
    await ledger.close()


async def test_what_is_used_today_and_this_month(database: Database) -> None:
    await add_key(database, "key-1", daily_tokens=100, monthly_tokens=1000)
    await add_key(database, "key-2", monthly_tokens=50)
    await add_key(database, "key-3")
    await add_key(database, "key-4", daily_tokens=1, deleted_ms=1)
    async with database.write() as connection:
        row = {"name": "research", "monthly_tokens": 200, "created_ms": 0}
        await connection.execute(insert(owners), [row])
    await spend(database, "2026-10-31T23:00:00", "key-1", 999)
    await spend(database, "2026-11-20T10:00:00", "key-1", 30, "research")
    await spend(database, "2026-11-21T10:00:00", "key-1", 10)
    await spend(database, "2026-11-21T10:00:00", "key-3", 500)
    rows = await budget_report(database, TODAY, 10)
    assert [(one.subject, one.name, one.used_today, one.used_this_month) for one in rows] == [
        ("owner", "research", 0, 30), ("key", "name of key-1", 10, 40),
        ("key", "name of key-2", 0, 0),
    ]  # fmt: skip
    assert [one.share for one in rows] == [0.15, 0.1, 0.0]
    assert [one.id for one in await budget_report(database, TODAY, 1)] == ["research", "key-1"]
    assert await key_budgets(database, TODAY, ["key-1", "key-3"]) == {"key-1": rows[1]}
