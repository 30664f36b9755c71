"""The ledger and the budgets while real processes are killed, stopped and frozen."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select

from app.auth import KeyStore
from app.database import Database, DatabaseUnavailable
from app.database.schema import usage_records
from app.errors import ServiceUnavailable
from app.telemetry.metrics import Metrics
from app.usage import ledger as ledger_module
from app.usage.budgets import Budgets
from app.usage.ledger import Ledger
from app.usage.token_usage import Usage
from tests.app.usage.records import budgeted, ledger_for, opened, record, rows, totals
from tests.services import PostgresServer
from tests.slow_link import slow_link
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


async def test_a_sigkill_loses_at_most_the_last_second(database_url: str) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.app.usage.steady", database_url,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    printed: list[tuple[float, str]] = []

    def note(line: bytes) -> None:
        if line.endswith(b"\n"):
            at, number = line.decode().split()
            printed.append((float(at), number))

    while not printed or printed[-1][0] - printed[0][0] < 2.5:
        line = await child.stdout.readline()
        assert line, "the child ended by itself"
        note(line)
    child.send_signal(signal.SIGKILL)
    async for line in child.stdout:
        note(line)
    await child.wait()
    end = printed[-1][0]
    async with opened(database_url) as database:
        kept = [row.request_id for row in await rows(database, usage_records)]
        found = await totals(database)
    assert {number for at, number in printed if at < end - 1.0} <= set(kept)
    assert len(kept) == len(set(kept)) == found["requests"]


@pytest.mark.services
class TestPostgres:
    @pytest.fixture
    async def database(self, own_postgres: PostgresServer) -> AsyncIterator[Database]:
        async with opened(own_postgres.url("postgres"), deadline_s=0.3) as database:
            yield database

    async def load_through(
        self, ledger: Ledger, faults: Callable[[], Awaitable[None]]
    ) -> tuple[int, int]:
        """Add records all the while; return how many, and their tokens."""
        added = tokens = 0
        faulting = asyncio.ensure_future(faults())
        while not faulting.done():
            for _ in range(10):
                ledger.end(*record(request_id=str(added), usage=Usage(added % 97, added % 89)))
                tokens += added % 97 + added % 89
                added += 1
            await asyncio.sleep(0.01)
        await faulting
        return added, tokens

    async def check(
        self, database: Database, ledger: Ledger, metrics: Metrics, added: tuple[int, int]
    ) -> None:
        """Nothing is lost, and nothing is there twice."""
        await ledger.close()
        found = await totals(database)
        assert (found["requests"], found["prompt_tokens"] + found["completion_tokens"]) == added
        lost = metrics.registry.get_sample_value("gateway_usage_records_lost_total")
        assert not lost

    async def test_ledger_recovers_from_a_restarted_server(
        self, database: Database, own_postgres: PostgresServer
    ) -> None:
        metrics = Metrics()
        ledger = ledger_for(database, metrics)
        running = asyncio.create_task(ledger.run())

        async def faults() -> None:
            for _ in range(3):
                await asyncio.sleep(0.6)
                await asyncio.to_thread(own_postgres.stop)
                await asyncio.sleep(0.3)
                await asyncio.to_thread(own_postgres.start)

        added = await self.load_through(ledger, faults)
        await self.check(database, ledger, metrics, added)
        assert running.cancelled()

    async def test_ledger_recovers_from_a_hanging_server(
        self, database: Database, own_postgres: PostgresServer
    ) -> None:
        metrics = Metrics()
        ledger = ledger_for(database, metrics)
        running = asyncio.create_task(ledger.run())

        async def faults() -> None:
            for hang_s in (0.1, 0.7, 0.4, 1.0):
                await asyncio.sleep(0.37)
                own_postgres.pause()
                await asyncio.sleep(hang_s)
                own_postgres.resume()

        added = await self.load_through(ledger, faults)
        await self.check(database, ledger, metrics, added)
        assert running.cancelled()

    async def test_slow_server_delays_usage_and_changes_of_keys_only(
        self, own_postgres: PostgresServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Each answer takes a part of the deadline, and a transaction five answers at least."""
        metrics = Metrics()
        async with (
            slow_link(own_postgres.port) as link,
            opened(link.url("postgres"), deadline_s=0.5) as database,
        ):
            ledger = ledger_for(database, metrics)
            running = asyncio.create_task(ledger.run())
            link.delay_s = 0.2
            for number in range(200):
                ledger.end(*record(request_id=str(number)))
            await wait_until(lambda: ledger.written == 1)
            await KeyStore(database).changed_since(None)
            with pytest.raises(DatabaseUnavailable):  # what a request waits for
                await database.fetch(select(usage_records.c.id).limit(1))
            link.delay_s = 0
            await ledger.close()
            assert running.cancelled()
            assert (await totals(database))["requests"] == 200
        assert metrics.registry.get_sample_value("gateway_ledger_errors_total") == 0
        assert not caplog.messages

    async def test_hanging_server_does_not_delay_shutdown(
        self, database: Database, own_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ledger_module, "CLOSE_S", 0.5)
        metrics = Metrics()
        ledger = ledger_for(database, metrics)
        running = asyncio.create_task(ledger.run())
        await asyncio.sleep(0)
        own_postgres.pause()
        for _ in range(7):
            ledger.end(*record())
        async with asyncio.timeout(20):
            await ledger.close()
        assert running.cancelled()
        assert metrics.registry.get_sample_value("gateway_usage_records_lost_total") == 7

    async def test_outage_serves_known_keys_and_refuses_others(
        self, database: Database, own_postgres: PostgresServer
    ) -> None:
        ledger = ledger_for(database)
        budgets = Budgets(database, ledger)
        try:
            with closing(await budgets.reserve(budgeted("key-1", 100, None), 10)):
                pass
            own_postgres.pause()
            for _ in range(3):
                ledger.end(*record(usage=Usage(10, 0)))
                with closing(await budgets.reserve(budgeted("key-1", 100, None), 10)):
                    pass
            with pytest.raises(ServiceUnavailable):
                await budgets.reserve(budgeted("key-2", 100, None), 10)
            own_postgres.resume()
            await ledger.close()
            assert (await totals(database))["requests"] == 3
        finally:
            await budgets.close()
