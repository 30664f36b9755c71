"""The record of every request that reached an engine: added at once, written in batches.

`add` only keeps a record in memory; `run` writes what waits four times a second, each batch with
its sums by day in one transaction, so that the sums are those of the records at every moment.
A SIGKILL loses what came within the last quarter of a second and the time of one write.

While the database is down up to MAX_WAITING records wait. Then it is the new ones that are lost:
what is kept is then one unbroken stretch, both ends of the gap are in the log, and a batch whose
commit nobody saw, which may well be in the database, is never given up. The access log has a line
for every request whatever happens here.

A record that the database takes offence at, however often it is asked, is given up and counted; the
others of its batch are written without it.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ScalarSelect, delete, select
from sqlalchemy.exc import SQLAlchemyError

from app.database import (
    AsyncConnection,
    Database,
    DatabaseError,
    DatabaseUnavailable,
    ValuesRejected,
    is_rejection,
)
from app.database.schema import usage_records
from app.settings import PriceSettings
from app.telemetry.metrics import Metrics
from app.usage.records import DailySums, Price, Stamped, UsageRecord, row_id, rows_of
from app.usage.statements import add_sums, insert_records

__all__ = ("Ledger", "UsageRecord")

log = logging.getLogger(__name__)

# How long a record waits for others.
FLUSH_S = 0.25
# Records of one transaction, and of one statement: while its rows are made, no token is relayed.
BATCH = 1_000
AT_ONCE = 128
MAX_WAITING = 100_000
# How often parts of a batch are tried to find which records are refused; then whole parts go.
MOST_TRIES = 200
RETRY_S = (0.25, 5.0)  # after the first failure, and at most; doubled in between
# How long the end of the gateway may wait for the database.
CLOSE_S = 5.0
RETENTION_EVERY_S = 3600.0
# Old records that go in one transaction, and the pause in which others may write.
RETENTION_CHUNK = 500
RETENTION_PAUSE_S = 0.05
_DAY_S = 86_400

Watch = Callable[[int, float, UsageRecord], None]


class _Batch:
    """Records of one transaction. `tried`: it may be in the database already."""

    __slots__ = ("number", "records", "refused", "tried")

    def __init__(self, number: int) -> None:
        self.number = number
        self.records: list[Stamped] = []
        self.tried = False
        self.refused = False  # one of them cannot be written


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
        count = len(self._open.records)
        # The open batch is one of those that may wait.
        if count >= BATCH and (len(self._closed) + 2) * BATCH <= self._max_waiting:
            self._turn()
            count = 0
        batch = self._open
        if self._watch is not None:
            self._watch(batch.number, at_s, record)
        if count >= BATCH or self._ended:
            self._lose(1)
            return
        batch.records.append((at_s, record))
        if count == 0:
            self._begun.set()
        elif count == BATCH - 1:
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
        if left := self.pending:
            self._closed.clear()
            self._metrics.usage_records_lost.add((), left)
            log.error("%d usage records are lost: the database does not answer", left)

    @property
    def pending(self) -> int:
        """How many records are not known to be in the database."""
        return len(self._open.records) + sum(len(batch.records) for batch in self._closed)

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
                if batch.refused:
                    await self._sift(batch)
                await self._write(batch)
            except ValuesRejected as error:
                fault: Exception = error
            except DatabaseUnavailable as error:
                self._metrics.ledger_errors.add()
                self._note_down(error)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, longest_s)
                continue
            except Exception as error:  # noqa: BLE001 - of a record that is not what it should be
                fault = error
            else:
                self._closed.popleft()
                self._written = batch.number
                pause_s = RETRY_S[0]
                continue
            self._metrics.ledger_errors.add()
            if not batch.refused:
                batch.refused = True
                continue
            self._closed.popleft()
            self._give_up(len(batch.records), fault)
        if self._down or self._lost:
            log.warning("usage is written again; %d records were lost", self._lost)
            self._down = False
            self._lost = 0

    async def _write(self, batch: _Batch) -> None:
        """Write a batch unless it is there. Raises DatabaseUnavailable."""
        if not batch.records:
            return
        sums = DailySums()
        async with self._database.write() as connection:
            if batch.tried and await self._is_there(connection, batch):
                return
            batch.tried = True
            for place in range(0, len(batch.records), AT_ONCE):
                records = batch.records[place : place + AT_ONCE]
                rows = rows_of(self._gateway, batch.number, records, self._prices, place)
                sums.add(rows)
                await insert_records(connection, rows)
            await add_sums(connection, sums)

    async def _sift(self, batch: _Batch) -> None:
        """Leave in a batch what the database takes. Raises DatabaseUnavailable."""
        records, good = batch.records, list[Stamped]()
        groups = deque(records[at : at + AT_ONCE] for at in range(0, len(records), AT_ONCE))
        reason: Exception | None = None
        tries = 0
        async with self._database.write() as connection:
            while groups:
                group = groups.popleft()
                tries += 1
                fault = await self._fault_of(connection, batch.number, group)
                if fault is None:
                    good += group
                elif len(group) > 1 and tries < MOST_TRIES:
                    half = len(group) // 2
                    groups.extendleft((group[half:], group[:half]))
                reason = fault or reason
        batch.records = good
        if reason is not None:
            self._give_up(len(records) - len(good), reason)

    async def _fault_of(
        self, connection: AsyncConnection, batch: int, records: Sequence[Stamped]
    ) -> Exception | None:
        """Return why records cannot be written, None if they can. They are not written."""
        savepoint = await connection.begin_nested()
        try:
            rows = rows_of(self._gateway, batch, records, self._prices)
            await insert_records(connection, rows)
        except Exception as error:
            if isinstance(error, SQLAlchemyError) and not is_rejection(error):
                raise
            return error
        finally:
            await savepoint.rollback()
        return None

    async def _is_there(self, connection: AsyncConnection, batch: _Batch) -> bool:
        first = usage_records.c.id == row_id(self._gateway, batch.number)
        return await connection.scalar(select(usage_records.c.id).where(first)) is not None

    def _note_down(self, error: DatabaseUnavailable) -> None:
        if not self._down:
            self._down = True
            log.error("usage waits in memory, %d records at most: %s", self._max_waiting, error)

    def _give_up(self, records: int, fault: Exception) -> None:
        """Lose records that the database will never take."""
        reason = getattr(fault, "orig", fault)  # without the statement and its parameters
        log.error("%d usage records cannot be written: %s", records, reason)
        self._lost += records
        self._metrics.usage_records_lost.add((), records)

    def _lose(self, records: int) -> None:
        if not self._lost:
            log.error("usage records are being lost")
        self._lost += records
        self._metrics.usage_records_lost.add((), records)

    # Retention

    async def _retain(self) -> None:
        while True:
            with contextlib.suppress(DatabaseError):  # there is time until the next round
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
