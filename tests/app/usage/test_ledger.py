"""Every added record reaches the database exactly once, with its sums, despite outages."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event

from app.database.retention import CHUNK
from app.database.schema import usage_daily, usage_records
from app.settings import PriceSettings
from app.telemetry import EndedRequest, RequestRecord, RequestTimeline
from app.telemetry.metrics import Metrics
from app.usage import ledger as ledger_module
from app.usage.ledger import BATCH, GROUP, Ledger
from app.usage.records import MAX_COST, MAX_TOKENS, DailySums, Price, Row, rows_of
from app.usage.token_usage import Usage
from tests.app.usage.records import PRICES, Clock, Faulty, ended, ledger_for, record, rows, totals
from tests.waiting import wait_until

DAY_S = 86_400


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "RETRY_S", (0.005, 0.01))


async def flushed(ledger: Ledger, *records: tuple[RequestRecord, RequestTimeline]) -> None:
    """Add records and have them written."""
    for one in records:
        ledger.end(*one)
    await ledger.close()


def all_have_written(ledgers: Sequence[Ledger], batches: int) -> bool:
    return all(ledger.written >= batches for ledger in ledgers)


def lost(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("gateway_usage_records_lost_total") or 0.0


class TestWriting:
    async def test_a_record_becomes_a_row(self, database: Faulty) -> None:
        clock = Clock("2026-11-21T23:59:59.999")
        usage = Usage(100, 10, cached=60, reasoning=4)
        await flushed(ledger_for(database, clock=clock), record(usage=usage, queued_s=1.5))
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

    async def test_interrupted_streams_are_recorded_and_others_are_null(
        self, database: Faulty
    ) -> None:
        await flushed(
            ledger_for(database),
            record(continued=1, recomputed_tokens=812),
            record(not_continued="stop"),
            record(recomputed_tokens=-1),
            record(),
        )
        found = await rows(database, usage_records)
        assert [(row.continued, row.recomputed_tokens, row.not_continued) for row in found] == [
            (1, 812, None),
            (None, None, "stop"),
            (None, None, None),
            (None, None, None),
        ]

    async def test_recomputed_tokens_are_not_charged(self, database: Faulty) -> None:
        await flushed(ledger_for(database), record(usage=Usage(7, 5), recomputed_tokens=10**6))
        (row,) = await rows(database, usage_records)
        assert (row.prompt_tokens, row.completion_tokens) == (7, 5)
        (day,) = await rows(database, usage_daily)
        assert (day.prompt_tokens, day.completion_tokens) == (7, 5)

    async def test_changed_price_applies_to_new_records_only(self, database: Faulty) -> None:
        ledger = ledger_for(database)
        ledger.reprice({"new": PriceSettings(completion=3.0)}, 1)
        usage = Usage(0, 10)
        await flushed(ledger, record(usage=usage), record(model="new", usage=usage))
        costs = {row.model: row.cost_nano for row in await rows(database, usage_records)}
        assert costs == {"demo": 10 * 8000, "new": 10 * 3000}

    async def test_batches_add_up_by_day_key_and_model(self, database: Faulty) -> None:
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

    @pytest.mark.parametrize(
        "count",
        [2, 3, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP + 13],
    )
    async def test_any_number_of_records_is_written_in_order(
        self, database: Faulty, count: int
    ) -> None:
        usages = [Usage(number, 2 * number, estimated=number % 2 == 0) for number in range(count)]
        await flushed(ledger_for(database), *[record(usage=usage) for usage in usages])
        found = sorted(await rows(database, usage_records), key=lambda row: row.id)
        assert [row.prompt_tokens for row in found] == list(range(count))
        assert [row.estimated for row in found] == [usage.estimated for usage in usages]
        (day,) = await rows(database, usage_daily)
        assert (day.requests, day.estimated_requests) == (count, (count + 1) // 2)
        assert day.completion_tokens == count * (count - 1)

    @pytest.mark.slow
    async def test_waiting_records_are_written_in_the_background(self, database: Faulty) -> None:
        ledger = ledger_for(database)
        running = asyncio.create_task(ledger.run())
        ledger.end(*record())
        await wait_until(lambda: ledger.written == 1)
        ledger.end(*record())
        await wait_until(lambda: ledger.written == 2)
        assert (await totals(database))["requests"] == 2
        await ledger.close()
        assert running.cancelled()

    async def test_a_full_batch_does_not_wait_for_more(
        self, database: Faulty, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ledger_module, "FLUSH_S", 3600.0)
        ledger = ledger_for(database)
        running = asyncio.create_task(ledger.run())
        await asyncio.sleep(0)
        for batch in (1, 2):
            for _ in range(BATCH):
                ledger.end(*record())
            await wait_until(partial(all_have_written, [ledger], batch))
        assert (await totals(database))["requests"] == 2 * BATCH
        await ledger.close()
        assert running.cancelled()

    async def test_cancel_of_run_then_close_loses_no_record(self, database: Faulty) -> None:
        ledger = ledger_for(database)
        running = asyncio.create_task(ledger.run())
        await asyncio.sleep(0)
        ledger.end(*record())
        running.cancel()
        await ledger.close()
        await ledger.close()
        assert (await totals(database))["requests"] == 1

    @pytest.mark.slow
    async def test_concurrent_writes_of_the_same_sums_do_not_deadlock(
        self, database: Faulty, caplog: pytest.LogCaptureFixture
    ) -> None:
        ledgers = [ledger_for(database) for _ in range(4)]
        tasks = [asyncio.create_task(ledger.run()) for ledger in ledgers]
        for round_ in range(5):
            for number, ledger in enumerate(ledgers):
                keys = [f"key-{n}" for n in range(60)]
                for key in keys if (number + round_) % 2 else reversed(keys):
                    ledger.end(*record(key_id=key))
            await wait_until(partial(all_have_written, ledgers, round_ + 1))
        await asyncio.gather(*(ledger.close() for ledger in ledgers))
        await asyncio.wait(tasks)
        found = await rows(database, usage_daily)
        assert [row.requests for row in found] == [20] * 60
        assert (await totals(database))["requests"] == 1200
        assert [each.message for each in caplog.records] == []


class TestUnheardCommit:
    async def test_batch_with_an_unconfirmed_commit_is_not_written_twice(
        self, database: Faulty
    ) -> None:
        database.unheard = 1
        ledger = ledger_for(database)
        await flushed(ledger, record(), record())
        found = await totals(database)
        assert (found["requests"], found["prompt_tokens"]) == (2, 14)
        assert ledger.written == 1

    async def test_a_batch_that_was_rolled_back_is_written(self, database: Faulty) -> None:
        ledger = ledger_for(database)
        failing = 1

        def fail(*_: object) -> None:
            nonlocal failing
            if failing:
                failing -= 1
                raise OSError("connection lost")

        event.listen(database.ledger_engine, "commit", fail)
        await flushed(ledger, record(), record())
        assert failing == 0
        assert (await totals(database))["requests"] == 2


class TestDatabaseDown:
    async def test_outage_is_logged_at_its_start_and_end(
        self,
        database: Faulty,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(ledger_module, "FLUSH_S", 0.001)
        database.down = True
        ledger = ledger_for(database)
        running = asyncio.create_task(ledger.run())
        for _ in range(10):
            ledger.end(*record())
        await wait_until(lambda: bool(caplog.records))
        database.down = False
        await wait_until(lambda: ledger.written and caplog.records[1:])
        assert [(each.levelno, each.message) for each in caplog.records] == [
            (
                logging.ERROR,
                "usage waits in memory, 100000 records at most: the database does not answer: "
                "it is down",
            ),
            (logging.WARNING, "usage ledger available again; 0 records were lost"),
        ]
        await ledger.close()
        assert running.cancelled()
        assert (await totals(database))["requests"] == 10

    async def test_full_buffer_drops_and_counts_new_records(
        self, database: Faulty, caplog: pytest.LogCaptureFixture
    ) -> None:
        metrics = Metrics()
        ledger = ledger_for(database, metrics, max_waiting=3 * BATCH)
        for number in range(3 * BATCH + 50):
            ledger.end(*record(request_id=str(number)))
        assert lost(metrics) == 50
        await ledger.close()
        kept = {int(row.request_id) for row in await rows(database, usage_records)}
        assert kept == set(range(3 * BATCH))
        assert [each.message for each in caplog.records] == [
            "usage ledger is full: new records are dropped",
            "usage ledger available again; 50 records were lost",
        ]

    async def test_records_unwritten_at_shutdown_are_counted_and_logged(
        self,
        database: Faulty,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(ledger_module, "CLOSE_S", 0.05)
        metrics = Metrics()
        database.down = True
        ledger = ledger_for(database, metrics)
        await flushed(ledger, *[record()] * (BATCH + 7))
        assert lost(metrics) == BATCH + 7
        assert caplog.messages[-1] == (
            f"{BATCH + 7} usage records are lost, which the access log has: "
            "the database does not answer: it is down"
        )
        ledger.end(*record())
        assert lost(metrics) == BATCH + 8


POISON = "poison"


async def forbid(database: Faulty, table: str) -> None:
    """Have the database refuse the model `poison` in a table, for ever."""
    if database.dialect == "postgresql":
        statement = f"ALTER TABLE {table} ADD CONSTRAINT picky CHECK (model <> '{POISON}')"
    else:
        statement = (
            f"CREATE TRIGGER picky BEFORE INSERT ON {table} WHEN NEW.model = '{POISON}' "
            "BEGIN SELECT RAISE(ABORT, 'picky'); END"
        )
    async with database.write() as connection:
        await connection.exec_driver_sql(statement)


class TestRefused:
    @pytest.fixture
    async def picky(self, database: Faulty) -> Faulty:
        await forbid(database, "usage_records")
        return database

    async def test_rejected_record_is_dropped_and_the_rest_written(
        self, picky: Faulty, caplog: pytest.LogCaptureFixture
    ) -> None:
        metrics = Metrics()
        ledger = ledger_for(picky, metrics)
        batch = [record(request_id=str(number)) for number in range(250)]
        batch[120] = record(model=POISON)
        await flushed(ledger, *batch)
        assert lost(metrics) == 1
        assert (await totals(picky))["requests"] == 249
        assert POISON not in {row.model for row in await rows(picky, usage_daily)}
        first, second = caplog.messages
        assert first.startswith("1 usage records dropped: ")
        assert "picky" in first
        assert second == "usage ledger available again; 1 records were lost"

    async def test_unconfirmed_commit_is_not_repeated(self, picky: Faulty) -> None:
        metrics = Metrics()
        ledger = ledger_for(picky, metrics)
        picky.unheard = 2  # what is found out about the batch, then the batch itself
        await flushed(ledger, record(model=POISON), record(), record())
        assert (await totals(picky))["requests"] == 2
        assert lost(metrics) == 1

    async def test_batch_of_rejected_records_does_not_block_others(
        self, picky: Faulty, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ledger_module, "MAX_TRIES", 20)
        metrics = Metrics()
        ledger = ledger_for(picky, metrics)
        await flushed(ledger, *[record(model=POISON)] * BATCH, record())
        assert lost(metrics) == BATCH
        assert (await totals(picky))["requests"] == 1

    async def test_malformed_record_is_dropped(self, database: Faulty) -> None:
        metrics = Metrics()
        ledger = ledger_for(database, metrics)
        await flushed(ledger, record(), record(usage="7"), record())
        assert lost(metrics) == 1
        assert (await totals(database))["requests"] == 2

    async def test_rejected_sums_do_not_block_other_batches(self, database: Faulty) -> None:
        await forbid(database, "usage_daily")
        metrics = Metrics()
        ledger = ledger_for(database, metrics)
        await flushed(ledger, *[record(model=POISON)] * BATCH, record())
        assert lost(metrics) == BATCH
        assert (await totals(database))["requests"] == 1


@pytest.mark.slow
async def test_full_disk_is_handled_as_an_outage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = Faulty(f"sqlite+aiosqlite:///{tmp_path}/gateway.db")
    await database.migrate()
    pages = 1

    def limit(connection: object) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")  # type: ignore[attr-defined]

    event.listen(database.ledger_engine, "begin", limit)
    ledger = ledger_for(database)
    running = asyncio.create_task(ledger.run())
    for _ in range(BATCH):
        ledger.end(*record())
    await wait_until(lambda: caplog.messages)
    assert "disk is full" in caplog.messages[0]
    pages = 1_000_000
    await wait_until(lambda: ledger.written)
    await ledger.close()
    assert running.cancelled()
    assert (await totals(database))["requests"] == BATCH
    await database.close()


class TestRetention:
    async def test_retention_deletes_records_and_keeps_sums(self, database: Faulty) -> None:
        clock = Clock()
        old, kept = CHUNK + 3, 5
        ledger = ledger_for(database, clock=clock)
        for _ in range(old):
            ledger.end(*record())
        clock.now += 1
        for _ in range(kept):
            ledger.end(*record())
        await ledger.close()
        clock.now += 90 * DAY_S - 1
        assert await ledger.delete_old() == 0
        clock.now += 0.5
        assert await ledger.delete_old() == old
        assert len(await rows(database, usage_records)) == kept
        (day,) = await rows(database, usage_daily)
        assert day.requests == old + kept

    async def test_concurrent_deletes_succeed(self, database: Faulty) -> None:
        clock = Clock()
        ledgers = [ledger_for(database, clock=clock) for _ in range(3)]
        await flushed(ledgers[0], *[record()] * (3 * CHUNK))
        clock.now += 91 * DAY_S
        gone = await asyncio.gather(*(ledger.delete_old() for ledger in ledgers))
        assert await rows(database, usage_records) == []
        assert sum(gone) == 3 * CHUNK

    async def test_cleanup_task_survives_an_outage(
        self, database: Faulty, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ledger_module, "RETENTION_EVERY_S", 0.01)
        clock = Clock()
        ledger = ledger_for(database, clock=clock)
        await flushed(ledger, record())
        clock.now += 91 * DAY_S
        ledger = ledger_for(database, clock=clock)
        database.down = True
        running = asyncio.create_task(ledger.run())
        await asyncio.sleep(0.03)
        database.down = False
        async with asyncio.timeout(20):
            while await rows(database, usage_records):
                await asyncio.sleep(0.01)
        await ledger.close()
        assert running.cancelled()


class TestBadInput:
    NAMES = (
        "o'brien\"; DROP TABLE usage_records; --", "%s{}%(a)s:a?", "模型 🙂", "a\x00b\x1b[0m\r\n",
        "\ud800", "x" * 1000, "",
    )  # fmt: skip

    @pytest.mark.parametrize("name", NAMES)
    async def test_record_may_contain_any_text(self, database: Faulty, name: str) -> None:
        fields = dict.fromkeys(("request_id", "key_id", "model", "endpoint"), name)
        for _ in range(2):
            await flushed(ledger_for(database), record(**fields, engine=name or "-"))
        first, second = await rows(database, usage_records)
        assert first.model == second.model
        clean = name.replace("\0", "\ufffd").replace("\ud800", "?")
        assert (first.request_id, first.key_id) == (clean[:128], clean[:64])
        assert (first.model, first.engine) == (clean[:256], clean[:64] or "-")
        (day,) = await rows(database, usage_daily)
        assert (day.key_id, day.model, day.requests) == (clean[:64], clean[:256], 2)

    @pytest.mark.parametrize("tokens", [2**53 - 1, 2**53, 2**64, 10**40])
    async def test_huge_counts_are_clamped_to_the_columns_range(
        self, database: Faulty, tokens: int
    ) -> None:
        usage = Usage(tokens, tokens, cached=0, reasoning=tokens)
        for _ in range(3):
            await flushed(ledger_for(database), *[record(usage=usage)] * 2)
        for row in await rows(database, usage_records):
            assert (row.prompt_tokens, row.completion_tokens) == (MAX_TOKENS, MAX_TOKENS)
        (day,) = await rows(database, usage_daily)
        assert (day.prompt_tokens, day.cost_nano, day.requests) == (MAX_TOKENS, MAX_COST, 6)

    async def test_negative_counts_and_missing_times_are_stored(self, database: Faulty) -> None:
        nan, inf = float("nan"), float("inf")
        usage = Usage(-1, -5, -7, -9)
        await flushed(
            ledger_for(database), record(usage=usage, queued_s=nan, ttft_s=inf, total_s=nan)
        )
        (row,) = await rows(database, usage_records)
        assert (row.prompt_tokens, row.completion_tokens, row.cost_nano) == (0, 0, 0)
        assert (row.queue_ms, row.ttft_ms, row.total_ms) == (None, None, 0.0)


COUNT = st.integers(0, 2**40)
RECORDS = st.lists(
    st.builds(
        ended,
        st.floats(0, 4e9),
        key_id=st.sampled_from(["a", "b"]),
        model=st.sampled_from(["demo", "other"]),
        owner=st.sampled_from(["", "research", "ops"]),
        usage=st.none() | st.builds(Usage, COUNT, COUNT, COUNT, COUNT, st.booleans()),
    ),
    max_size=20,
)


@given(records=RECORDS)
def test_daily_sums_are_those_of_the_records(records: list[EndedRequest]) -> None:
    prices = {name: Price.of(price) for name, price in PRICES.items()}
    each: list[Row] = []
    daily = DailySums()
    for place in range(0, len(records), 3):
        some = rows_of("0123456789abcdef", 7, records[place : place + 3], prices, place)
        daily.add(some)
        each += some
    days = daily.by_key()
    assert len({row.id for row in each}) == len(records)
    assert all(len(row.id) == 32 for row in each)
    assert [row.id for row in each] == sorted(row.id for row in each)
    names = [(day["day"], day["key_id"], day["model"]) for day in days]
    assert names == sorted(set(names))
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_nano"):
        assert sum(getattr(row, name) for row in each) == sum(day[name] for day in days)
    owned = daily.by_owner()
    places = [(day["owner"], day["day"], day["key_id"], day["model"]) for day in owned]
    assert places == sorted(set(places))
    for owner in ("", "research", "ops"):
        tokens = sum(row.prompt_tokens for row in each if row.owner == owner)
        found = sum(day["prompt_tokens"] for day in owned if day["owner"] == owner)
        assert found == (tokens if owner else 0)
    assert sum(day["requests"] for day in days) == len(records)
    assert sum(day["estimated_requests"] for day in days) == sum(r.estimated for r in each)


@given(seconds=st.floats(0, 1e6))
def test_times_are_kept_in_milliseconds_to_the_microsecond(seconds: float) -> None:
    ((row),) = rows_of("0123456789abcdef", 7, [ended(0.0, total_s=seconds)], {})
    assert row.total_ms == pytest.approx(seconds * 1000, rel=0, abs=0.0005001)
    assert row.total_ms == round(row.total_ms, 3)
