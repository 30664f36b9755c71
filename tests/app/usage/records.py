"""Usage records for tests, and queries for them."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Select, func, make_url, select

from app.auth import Owner, Principal, Role
from app.database import AsyncConnection, Database, DatabaseUnavailable, Lane
from app.database.schema import usage_daily, usage_records
from app.settings import NO_LIMITS, PriceSettings
from app.telemetry import EndedRequest, RequestRecord, RequestTimeline
from app.telemetry.metrics import Metrics
from app.usage.ledger import Ledger
from app.usage.token_usage import Usage
from tests.gateway import make_tables

ResultT = TypeVar("ResultT")
PRICES = {"demo": PriceSettings(prompt=2.0, cached=0.5, completion=8.0)}
COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "cost_nano")


def record(**fields: Any) -> tuple[RequestRecord, RequestTimeline]:
    """A completed request, but for these fields."""
    usual: dict[str, Any] = {
        "request_id": "r-1",
        "key_id": "key-1",
        "model": "demo",
        "engine": "demo-0",
        "endpoint": "chat_completions",
        "method": "POST",
        "status": 200,
        "usage": Usage(7, 5),
        "queued_s": None,
        "ttft_s": 0.01,
        "total_s": 0.02,
    }
    return RequestRecord(**{**usual, **fields}), RequestTimeline(100.0, limits_began=100.001)


def ended(at_s: float, **fields: Any) -> EndedRequest:
    """A completed request, but for these fields, that ended at a time."""
    return EndedRequest(*record(**fields), at_s, "01234567")


def budgeted(
    key_id: str,
    daily: int | None = None,
    monthly: int | None = None,
    owner: Owner | None = None,
    daily_cost: int | None = None,
    monthly_cost: int | None = None,
) -> Principal:
    """A key with budgets in tokens, and in nano of the currency."""
    return Principal(
        key_id,
        Role.CLIENT,
        NO_LIMITS,
        daily_tokens=daily,
        monthly_tokens=monthly,
        owner=owner,
        daily_cost_nano=daily_cost,
        monthly_cost_nano=monthly_cost,
    )


class Clock:
    """The wall clock of a test."""

    def __init__(self, at: str = "2026-11-21T12:00:00") -> None:
        self.now = 0.0
        self.set(at)

    def __call__(self) -> float:
        return self.now

    def set(self, at: str) -> None:
        """Go to a moment, UTC."""
        self.now = datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()


class Faulty(Database):
    """The real database, counted, and with the faults that a test orders."""

    reads = 0
    down = False
    # How many commits will be done and then not heard of.
    unheard = 0

    @property
    def ledger_engine(self) -> Engine:
        """The one whose connections write the ledger."""
        return self._threaded or self._engine.sync_engine

    async def fetch(self, query: Select[Any], lane: Lane = Lane.REQUESTS) -> Sequence[Any]:
        self.reads += self.dialect == "sqlite" or self.down  # else it is a read
        if self.down:
            raise DatabaseUnavailable("the database does not answer: it is down")
        return await super().fetch(query, lane)

    @asynccontextmanager
    async def read(self, lane: Lane = Lane.PAGES) -> AsyncIterator[AsyncConnection]:
        self.reads += 1
        if self.down:
            raise DatabaseUnavailable("the database does not answer: it is down")
        async with super().read(lane) as connection:
            yield connection

    @asynccontextmanager
    async def write(self, lane: Lane = Lane.PAGES) -> AsyncIterator[AsyncConnection]:
        if self.down:
            raise DatabaseUnavailable("the database does not answer: it is down")
        async with super().write(lane) as connection:
            yield connection
        if self.unheard:
            self.unheard -= 1
            raise DatabaseUnavailable("the database does not answer: connection lost")

    async def transact(self, function: Callable[[Connection], ResultT], lane: Lane) -> ResultT:
        if self.down:
            raise DatabaseUnavailable("the database does not answer: it is down")
        result = await super().transact(function, lane)
        if self.unheard and self.dialect == "sqlite":  # else it is a write
            self.unheard -= 1
            raise DatabaseUnavailable("the database does not answer: connection lost")
        return result


def ledger_for(database: Database, metrics: Metrics | None = None, **options: Any) -> Ledger:
    """A ledger that keeps records for 90 days."""
    return Ledger(database, metrics or Metrics(), PRICES, 90, **options)


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Faulty]:
    """A database whose tables are there."""
    file = make_url(url).database
    if url.startswith("sqlite") and file is not None and not Path(file).exists():
        make_tables(Path(file))
    database = Faulty(url, **options)
    try:
        await database.migrate()
        yield database
    finally:
        await database.close()


async def rows(database: Database, table: Any) -> Sequence[Any]:
    """Every row of a table, in order."""
    async with database.read() as connection:
        return (await connection.execute(select(table).order_by(*table.primary_key))).all()


async def totals(database: Database) -> dict[str, int]:
    """The number of records and the sums of their counts; asserts that the daily sums agree."""
    recorded = [func.sum(usage_records.c[name]) for name in COUNTS]
    daily = [func.sum(usage_daily.c[name]) for name in COUNTS]
    async with database.read() as connection:
        one = (await connection.execute(select(func.count(), *recorded))).one()
        other = (await connection.execute(select(func.sum(usage_daily.c.requests), *daily))).one()
    found = [int(value or 0) for value in one]
    assert found == [int(value or 0) for value in other]
    return dict(zip(("requests", *COUNTS), found, strict=True))
