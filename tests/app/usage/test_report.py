"""Sums of what was used, on both databases."""

from datetime import date
from typing import Any

import pytest
from sqlalchemy import insert

from app.database import Database
from app.database.schema import api_keys
from app.usage.records import MAX_TOKENS
from app.usage.report import GROUPS, usage_report
from app.usage.token_usage import Usage
from tests.app.usage.records import Clock, ledger_for, record

FIRST, LAST = date(2026, 11, 20), date(2026, 11, 21)


async def spend(database: Database, at: str, *usages: Usage, **fields: str) -> None:
    ledger = ledger_for(database, clock=Clock(at))
    for usage in usages:
        ledger.end(*record(usage=usage, **fields))
    await ledger.close()


async def name(database: Database, key_id: str, called: str, deleted_ms: int | None = None) -> None:
    row = {
        "id": key_id,
        "name": called,
        "owner": "",
        "role": "client",
        "models": ["*"],
        "priority": 0,
        "weight": 1,
        "disabled": False,
        "created_ms": 0,
        "deleted_ms": deleted_ms,
        "revision": 1,
    }
    async with database.write() as connection:
        await connection.execute(insert(api_keys), [row])


@pytest.fixture
async def spent(database: Database) -> Database:
    await spend(database, "2026-11-20T10:00:00", Usage(100, 10, 40, 4), Usage(1, 1))
    await spend(database, "2026-11-21T10:00:00", Usage(7, 3, estimated=True))
    await spend(database, "2026-11-21T10:00:00", Usage(50, 5), key_id="key-2", model="other")
    await spend(database, "2026-11-19T23:59:59.999", Usage(1000, 1000))
    await spend(database, "2026-11-22T00:00:00", Usage(1000, 1000))
    return database


async def test_rows_have_the_sums_of_their_group_in_order(spent: Database) -> None:
    rows = await usage_report(spent, GROUPS, FIRST, LAST)
    assert [(row.day, row.key_id, row.model, row.requests) for row in rows] == [
        ("2026-11-20", "key-1", "demo", 2),
        ("2026-11-21", "key-1", "demo", 1),
        ("2026-11-21", "key-2", "other", 1),
    ]
    first = rows[0]
    assert (first.prompt_tokens, first.cached_tokens) == (101, 40)
    assert (first.completion_tokens, first.reasoning_tokens) == (11, 4)
    assert first.cost_nano == 61 * 2000 + 40 * 500 + 11 * 8000
    assert [row.estimated_requests for row in rows] == [0, 1, 0]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ({"key"}, [(None, "key-1", None, 122), (None, "key-2", None, 55)]),
        ({"model"}, [(None, None, "demo", 122), (None, None, "other", 55)]),
        ({"day"}, [("2026-11-20", None, None, 112), ("2026-11-21", None, None, 65)]),
        (set(), [(None, None, None, 177)]),
    ],
)
async def test_ungrouped_columns_are_summed(
    spent: Database, by: set[str], expected: list[object]
) -> None:
    rows = await usage_report(spent, by, FIRST, LAST)
    found = [
        (row.day, row.key_id, row.model, row.prompt_tokens + row.completion_tokens) for row in rows
    ]
    assert found == expected
    assert sum(row.cost_nano for row in rows) == (61 + 7) * 2000 + 40 * 500 + (11 + 3) * 8000


async def test_report_of_a_single_key(spent: Database) -> None:
    (row,) = await usage_report(spent, {"model"}, FIRST, LAST, "key-2")
    assert (row.model, row.prompt_tokens) == ("other", 50)
    assert await usage_report(spent, {"model"}, FIRST, LAST, "' OR 1=1 --") == []
    assert await usage_report(spent, set(), FIRST, LAST, "nobody") == []


async def test_limit_returns_the_first_rows(spent: Database) -> None:
    assert len(await usage_report(spent, GROUPS, FIRST, LAST, None, 2)) == 2


async def test_rows_name_keys_including_deleted_ones(spent: Database) -> None:
    await name(spent, "key-1", "ci", deleted_ms=1)
    rows = await usage_report(spent, {"key"}, FIRST, LAST)
    assert [(row.key_id, row.key_name) for row in rows] == [("key-1", "ci"), ("key-2", None)]


async def test_one_model(spent: Database) -> None:
    rows = await usage_report(spent, {"key"}, FIRST, LAST, model="other")
    assert [(row.key_id, row.prompt_tokens) for row in rows] == [("key-2", 50)]
    assert await usage_report(spent, {"key"}, FIRST, LAST, model="x", owner="") == []


async def test_the_newest_day_and_the_largest_row_come_first(spent: Database) -> None:
    rows = await usage_report(spent, {"day", "key"}, FIRST, LAST, largest_first=True)
    assert [(row.day, row.key_id) for row in rows] == [
        ("2026-11-21", "key-2"), ("2026-11-21", "key-1"), ("2026-11-20", "key-1"),
    ]  # fmt: skip
    (largest,) = await usage_report(spent, {"key"}, FIRST, LAST, None, 1, largest_first=True)
    assert largest.key_id == "key-1"


async def test_usage_belongs_to_the_owner_that_a_key_had_then(database: Database) -> None:
    """Also where the key was deleted, or has another owner by now."""
    await spend(database, "2026-11-20T10:00:00", Usage(10, 1), owner="research")
    await spend(database, "2026-11-20T11:00:00", Usage(20, 2), owner="ops")
    await spend(database, "2026-11-20T12:00:00", Usage(40, 4))
    await spend(database, "2026-11-21T10:00:00", Usage(80, 8), owner="ops", key_id="key-2")
    await spend(database, "2026-11-21T10:00:00", Usage(160, 16), key_id="key-3")
    await name(database, "key-1", "ci", deleted_ms=1)

    async def found(by: set[str], **only: Any) -> list[tuple[object, ...]]:
        rows = await usage_report(database, by, FIRST, LAST, **only)
        return [(row.owner, row.key_id, row.requests, row.prompt_tokens) for row in rows]

    assert await found({"owner"}) == [
        ("", None, 2, 200), ("ops", None, 2, 100), ("research", None, 1, 10),
    ]  # fmt: skip
    assert await found({"owner", "key"}) == [
        ("", "key-1", 1, 40), ("", "key-3", 1, 160), ("ops", "key-1", 1, 20),
        ("ops", "key-2", 1, 80), ("research", "key-1", 1, 10),
    ]  # fmt: skip
    assert await found({"key"}, owner="ops") == [(None, "key-1", 1, 20), (None, "key-2", 1, 80)]
    assert await found({"owner"}, owner="") == [("", None, 2, 200)]
    assert await found({"owner"}, key_id="key-1") == [
        ("", None, 1, 40), ("ops", None, 1, 20), ("research", None, 1, 10),
    ]  # fmt: skip
    by_key = await usage_report(database, {"key"}, FIRST, LAST)
    by_both = await usage_report(database, {"key", "owner"}, FIRST, LAST)
    assert sum(row.cost_nano for row in by_key) == sum(row.cost_nano for row in by_both)
    assert [row.key_name for row in by_both] == ["ci", None, "ci", None, "ci"]


async def test_sums_beyond_64_bits_of_cost_are_exact(database: Database) -> None:
    """Nonsense counts from an engine must not break the reports of other keys."""
    for number in range(20):
        nonsense = Usage(MAX_TOKENS, MAX_TOKENS)
        await spend(database, "2026-11-20T10:00:00", *[nonsense] * 3, key_id=f"key-{number}")
    (row,) = await usage_report(database, set(), FIRST, LAST)
    assert row.cost_nano == 20 * 2**60
    assert row.prompt_tokens == 20 * MAX_TOKENS
