"""What is added is in the database once, with its sums, whatever the database does meanwhile."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.database.database import Database
from app.database.schema import usage_daily, usage_records
from app.usage.ledger import Ledger
from app.usage.reading import Usage
from tests.app.usage.records import Clock, ledger_for, opened, record, rows, totals


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with opened(database_url) as database:
        yield database


async def flushed(ledger: Ledger, *records: Any) -> None:
    """Add records and have them written."""
    for one in records:
        ledger.add(one)
    await ledger.close()


class TestWriting:
    async def test_a_record_becomes_a_row(self, database: Database) -> None:
        clock = Clock("2026-11-21T23:59:59.999")
        usage = Usage(100, 10, cached=60, reasoning=4)
        await flushed(ledger_for(database, clock=clock), record(usage=usage, queue_s=1.5))
        (row,) = await rows(database, usage_records)
        assert len(row.id) == 32
        assert row.at_ms == int(clock.now * 1000)
        assert (row.request_id, row.key_id, row.model) == ("r-1", "key-1", "demo")
        assert (row.engine, row.endpoint) == ("demo-0", "chat_completions")
        assert (row.status, row.outcome, row.estimated) == (200, "completed", False)
        assert (row.prompt_tokens, row.cached_tokens) == (100, 60)
        assert (row.completion_tokens, row.reasoning_tokens) == (10, 4)
        assert (row.queue_ms, row.ttft_ms, row.total_ms) == (1500.0, 10.0, 20.0)
        assert row.cost_nano == 40 * 2000 + 60 * 500 + 10 * 8000
        (day,) = await rows(database, usage_daily)
        assert tuple(day) == ("2026-11-21", "key-1", "demo", 1, 0, 100, 60, 10, 4, row.cost_nano)

    async def test_batches_add_up_by_day_key_and_model(self, database: Database) -> None:
        clock = Clock("2026-11-21T23:59:59.9")
        for _ in range(2):
            ledger = ledger_for(database, clock=clock)
            await flushed(ledger, record(), record(usage=None), record(key_id="key-2", model="o"))
        clock.now += 0.1
        await flushed(ledger_for(database, clock=clock), record(usage=Usage(1, 2, estimated=True)))
        found = [
            (*tuple(row)[:6], row.completion_tokens) for row in await rows(database, usage_daily)
        ]
        assert found == [
            ("2026-11-21", "key-1", "demo", 4, 0, 14, 10),
            ("2026-11-21", "key-2", "o", 2, 0, 14, 10),
            ("2026-11-22", "key-1", "demo", 1, 1, 1, 2),
        ]
        assert (await totals(database))["requests"] == 7
