"""The record of every request that reached an engine: added at once, written in batches.

`add` only keeps a record in memory; `run` writes what waits four times a second, each batch with
its sums by day in one transaction, so that the sums are those of the records at every moment.
A SIGKILL loses what came within the last quarter of a second and the time of one write.

While the database is down up to MAX_WAITING records wait. Then it is the new ones that are lost:
what is kept is then one unbroken stretch, both ends of the gap are in the log, and a batch whose
commit nobody saw, which may well be in the database, is never given up. The access log has a line
for every request whatever happens here.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import (
    JSON,
    Insert,
    ScalarSelect,
    String,
    bindparam,
    case,
    cast,
    column,
    delete,
    func,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from app.database.database import Database, DatabaseUnavailable
from app.database.schema import usage_daily, usage_records
from app.settings import PriceSettings
from app.telemetry.metrics import Metrics
from app.usage.rows import MOST, DailySums, Price, Stamped, UsageRecord, row_id, rows_of

__all__ = ("Ledger", "UsageRecord")

log = logging.getLogger(__name__)

# How long a record waits for others.
FLUSH_S = 0.25
# Records of one transaction, and of one statement: while its rows are made, no token is relayed.
BATCH = 1_000
AT_ONCE = 100
MAX_WAITING = 100_000
RETRY_S = (0.25, 5.0)  # after the first failure, and at most; doubled in between
# How long the end of the gateway may wait for the database.
CLOSE_S = 5.0
RETENTION_EVERY_S = 3600.0
# Old records that go in one transaction, and the pause in which others may write.
RETENTION_CHUNK = 500
RETENTION_PAUSE_S = 0.05
_DAY_S = 86_400

_json = msgspec.json.Encoder()

Watch = Callable[[int, float, UsageRecord], None]


class _Batch:
    """Records of one transaction. `tried`: it may be in the database already."""

    __slots__ = ("number", "records", "tried")

    def __init__(self, number: int) -> None:
        self.number = number
        self.records: list[Stamped] = []
        self.tried = False


class Ledger:
    """Takes records from one event loop; `run` and `close` write them."""

    def __init__(
        self,
        database: Database,
        metrics: Metrics,
        prices: Mapping[str, PriceSettings],
        retention_days: int,
        *,
        clock: Callable[[], float] = time.time,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._database = database
        self._metrics = metrics
        self._prices: dict[str, Price] = {}
        self.reprice(prices, retention_days)
        self._clock = clock
        self._max_waiting = max_waiting
        self._gateway = secrets.token_hex(8)
        self._open = _Batch(1)
        self._closed: deque[_Batch] = deque()  # in order; the first is written, or tried, first
        self._written = 0
        self._begun = asyncio.Event()  # a record waits
        self._full = asyncio.Event()  # so many that there is no reason to wait for more
        self._watch: Watch | None = None
        self._running: asyncio.Task[Any] | None = None
        self._ended = False
        self._down = False
        self._lost = 0  # since all was well

    def reprice(self, prices: Mapping[str, PriceSettings], retention_days: int) -> None:
        """Count what is written from now on at these prices; a model without one keeps its own."""
        self._prices |= {model: Price.of(price) for model, price in prices.items()}
        self._retention_s = retention_days * _DAY_S

    def add(self, record: UsageRecord) -> None:
        """Take in a record, stamped with the present. Raises nothing."""
        at_s = self._clock()
        # The open batch is one of those that may wait.
        if (
            len(self._open.records) >= BATCH
            and (len(self._closed) + 2) * BATCH <= self._max_waiting
        ):
            self._turn()
        batch = self._open
        if self._watch is not None:
            self._watch(batch.number, at_s, record)
        if len(batch.records) >= BATCH or self._ended:
            self._lose(1)
            return
        batch.records.append((at_s, record))
        if len(batch.records) == 1:
            self._begun.set()
        elif len(batch.records) == BATCH:
            self._full.set()

    async def run(self) -> None:
        """Write what is added and delete what is old, until `close` or a cancellation."""
        self._running = asyncio.current_task()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write_for_ever(), name="write usage")
            tasks.create_task(self._retain(), name="delete old usage")

    async def close(self) -> None:
        """Write what is left, within CLOSE_S; say how many records were lost. Ends `run`."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,), timeout=CLOSE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._turn():
                    await self._write_closed()
        self._ended = True
        self._turn()
        left = sum(len(batch.records) for batch in self._closed)
        if left:
            self._closed.clear()
            self._metrics.usage_lost(left)
            log.error("%d usage records are lost: the database does not answer", left)

    # What budgets need, to count every record once

    @property
    def written(self) -> int:
        """The number of the last batch that is known to be in the database; 0: none."""
        return self._written

    def watch(self, watch: Watch) -> None:
        """Have a function told of every record, lost ones too: batch, moment, record."""
        self._watch = watch

    def unwritten(self) -> Iterator[tuple[int, float, UsageRecord]]:
        """Return the records that are not known to be in the database, as `watch` has them."""
        for batch in (*self._closed, self._open):
            for at_s, record in batch.records:
                yield batch.number, at_s, record

    def newest_row(self) -> ScalarSelect[str]:
        """Return SQL for the newest row of this gateway: `batch_of` it and all before are there."""
        column = usage_records.c.id
        mine = column.between(f"{self._gateway}{'0' * 16}", f"{self._gateway}{'f' * 16}")
        return select(column).where(mine).order_by(column.desc()).limit(1).scalar_subquery()

    # Writing

    def _turn(self) -> bool:
        """Close the open batch if it holds anything; return whether there is one to write."""
        if self._open.records:
            self._closed.append(self._open)
            self._open = _Batch(self._open.number + 1)
            self._begun.clear()
        return bool(self._closed)

    async def _write_for_ever(self) -> None:
        while True:
            await self._begun.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._full.wait()
            self._full.clear()
            self._turn()
            await self._write_closed()

    async def _write_closed(self) -> None:
        """Write every closed batch in order, trying again for as long as it takes."""
        pause_s, longest_s = RETRY_S
        while self._closed:
            batch = self._closed[0]
            try:
                await self._write(batch)
            except DatabaseUnavailable as error:
                self._note_down(error)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, longest_s)
                continue
            except Exception:
                log.exception("%d usage records cannot be written", len(batch.records))
                self._lose(len(batch.records))
            else:
                self._written = batch.number
                pause_s = RETRY_S[0]
            self._closed.popleft()
        if self._down or self._lost:
            log.warning("usage is written again; %d records were lost", self._lost)
            self._down = False
            self._lost = 0

    async def _write(self, batch: _Batch) -> None:
        """Write a batch unless it is there. Raises DatabaseUnavailable."""
        sums = DailySums()
        insert = _insert_records(self._database.dialect)
        async with self._database.write() as connection:
            if batch.tried and await self._is_there(connection, batch):
                return
            batch.tried = True
            for place in range(0, len(batch.records), AT_ONCE):
                records = batch.records[place : place + AT_ONCE]
                rows = rows_of(self._gateway, batch.number, records, self._prices, place)
                sums.add(rows)
                await connection.execute(insert, {"rows": _json.encode(rows).decode()})
            await connection.execute(_add_to_daily(self._database.dialect), sums.rows())

    async def _is_there(self, connection: AsyncConnection, batch: _Batch) -> bool:
        first = usage_records.c.id == row_id(self._gateway, batch.number)
        return await connection.scalar(select(usage_records.c.id).where(first)) is not None

    def _note_down(self, error: DatabaseUnavailable) -> None:
        if not self._down:
            self._down = True
            log.error("usage waits in memory, %d records at most: %s", self._max_waiting, error)

    def _lose(self, records: int) -> None:
        if not self._lost:
            log.error("usage records are being lost")
        self._lost += records
        self._metrics.usage_lost(records)

    # Retention

    async def _retain(self) -> None:
        while True:
            with contextlib.suppress(DatabaseUnavailable):  # there is time until the next round
                await self.delete_old()
            await asyncio.sleep(RETENTION_EVERY_S)

    async def delete_old(self) -> int:
        """Delete the records whose time is over, a few at a time; return how many those were.

        Raises DatabaseUnavailable.
        """
        before_ms = int((self._clock() - self._retention_s) * 1000)
        column = usage_records.c.id
        old = (
            select(column)
            .where(usage_records.c.at_ms < before_ms)
            .order_by(usage_records.c.at_ms)
            .limit(RETENTION_CHUNK)
            # Gateways that delete at the same time take different ones; SQLite has one writer.
            .with_for_update(skip_locked=True)
        )
        deleted = 0
        while True:
            async with self._database.write() as connection:
                done = await connection.execute(delete(usage_records).where(column.in_(old)))
            deleted += done.rowcount
            if done.rowcount < RETENTION_CHUNK:
                return deleted
            await asyncio.sleep(RETENTION_PAUSE_S)


@cache
def _insert_records(dialect: str) -> Insert:
    """Return the statement that inserts `rows`, a JSON list of objects.

    One parameter, for the sake of those who stream meanwhile: with one for each value, SQLite's
    driver takes Python's lock for every row, and asyncpg converts every value on the loop.
    """
    rows = bindparam("rows", type_=String)
    columns = usage_records.columns
    if dialect == "postgresql":
        typed = [column(one.name, one.type) for one in columns]
        records = func.json_to_recordset(cast(rows, JSON)).table_valued(*typed)
        source = select(*records.render_derived(with_types=True).columns)
    else:
        each = func.json_each(rows).table_valued("value")
        source = select(*(func.json_extract(each.c.value, f"$.{one.name}") for one in columns))
    return usage_records.insert().from_select([one.name for one in columns], source)


@cache
def _add_to_daily(dialect: str) -> Any:
    """Return the statement that adds rows to `usage_daily`."""
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement: Any = insert(usage_daily)
    sums = {}
    for name, most in MOST.items():
        total = usage_daily.c[name] + statement.excluded[name]
        sums[name] = case((total > most, most), else_=total)
    return statement.on_conflict_do_update(index_elements=["day", "key_id", "model"], set_=sums)
