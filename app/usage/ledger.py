"""The usage ledger: a record of every request that reached an engine, written in batches.

Requests that failed before they reached one are stored too, for the history of requests, but not
more than FAILURES_PER_S; sums do not count them.

`end` only appends a record in memory; `run` writes the waiting records four times a second, each
batch and its daily sums in one transaction, so that the sums always match the records. A SIGKILL
loses the records of the last quarter of a second and of one write.

While the database is down up to MAX_WAITING records wait. Beyond that new records are dropped: the
stored ones have a single gap, both of whose ends are in the log, and a batch whose commit was not
confirmed, and which may be in the database, is never dropped. The access log has a line for every
request in any case.

A record that the database rejects is dropped and counted; the others of its batch are written.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection, ScalarSelect, select
from sqlalchemy.exc import SQLAlchemyError

from app.database import (
    Database,
    DatabaseError,
    DatabaseUnavailable,
    Lane,
    ValuesRejected,
    delete_before,
    is_rejection,
)
from app.database.schema import usage_records
from app.settings import PriceSettings
from app.telemetry import GATEWAY_DIGITS, NO_KEY, EndedRequest, RequestRecord, RequestTimeline
from app.telemetry.metrics import Metrics
from app.usage.records import DailySums, Price, row_id, rows_of
from app.usage.statements import add_sums, insert_records

log = logging.getLogger(__name__)

# Maximum wait of a record for others of its batch.
FLUSH_S = 0.25
# Records per transaction, and per statement: building its rows blocks the event loop.
BATCH = 1_000
LAST_PLACE = BATCH - 1
GROUP = 128
MAX_WAITING = 100_000
# Requests that failed before they reached an engine: all of a long outage would fill the database.
FAILURES_PER_S = 20
# Attempts to find the rejected records of a batch by bisection; then whole parts are dropped.
MAX_TRIES = 200
RETRY_S = (0.25, 5.0)  # first and maximum backoff; doubled in between
# Maximum wait for the database at shutdown.
CLOSE_S = 5.0
RETENTION_EVERY_S = 3600.0
_DAY_S = 86_400

# Called with the batch and the request.
RecordListener = Callable[[int, EndedRequest], None]


class _Batch(msgspec.Struct, eq=False):
    """Records of one transaction."""

    number: int
    records: list[EndedRequest] = []
    tried: bool = False  # it may already be in the database
    rejected: bool = False  # the database rejects one of them


class Ledger:
    """Accepts records from one event loop; `run` and `close` write them."""

    def __init__(
        self,
        database: Database,
        metrics: Metrics,
        prices: Mapping[str, PriceSettings],
        retention_days: int,
        *,
        currency: str | None = None,
        clock: Callable[[], float] = time.time,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._database = database
        self._metrics = metrics
        self._prices: dict[str, Price] = {}
        self.reprice(prices, retention_days, currency)
        self._clock = clock
        self._max_waiting = max_waiting
        self._gateway = secrets.token_hex(8)
        self.gateway = self._gateway[:GATEWAY_DIGITS]  # of this process, in IDs of requests
        self._open = _Batch(1)
        self._closed: deque[_Batch] = deque()  # in order of writing
        self.written = 0  # the last batch that is confirmed to be in the database
        self._begun = asyncio.Event()  # set while the open batch has records
        self._full = asyncio.Event()  # set when the open batch is full
        self._listener: RecordListener | None = None
        self._running: asyncio.Task[Any] | None = None
        self._ended = False
        self._outage: DatabaseUnavailable | None = None
        self._lost = 0  # since the last successful write
        self._failures_at = 0  # the second of `_failures`
        self._failures = 0

    def reprice(
        self, prices: Mapping[str, PriceSettings], retention_days: int, currency: str | None = None
    ) -> None:
        """Apply new prices to records written from now on; other models keep theirs."""
        self._prices |= {model: Price.of(price) for model, price in prices.items()}
        self._retention_s = retention_days * _DAY_S
        self.currency = currency or ""

    def price_of(self, model: str) -> Price | None:
        """Return the price of a model's tokens now; None: it has never been configured."""
        return self._prices.get(model)

    def end(self, record: RequestRecord, timeline: RequestTimeline) -> EndedRequest:
        """Return a request as ended now, and store it if it belongs here. Raises nothing."""
        ended = EndedRequest(record, timeline, self._clock(), self.gateway)
        if record.engine is None and not self._is_kept_failure(ended):
            return ended
        batch = self._open
        count = len(batch.records)
        # The open batch counts among those that wait.
        if count >= BATCH and (len(self._closed) + 2) * BATCH <= self._max_waiting:
            self._close_batch()
            batch, count = self._open, 0
        if self._listener is not None:
            self._listener(batch.number, ended)
        if count >= BATCH or self._ended:
            self._overflow()
            return ended
        batch.records.append(ended)
        if count == 0:
            self._begun.set()
        elif count == LAST_PLACE:
            self._full.set()
        return ended

    def _is_kept_failure(self, ended: EndedRequest) -> bool:
        if ended.record.key_id == NO_KEY or ended.record.outcome != "failed":
            return False
        second = int(ended.ended_at)
        if second != self._failures_at:
            self._failures_at, self._failures = second, 0
        self._failures += 1
        return self._failures <= FAILURES_PER_S

    async def run(self) -> None:
        """Write new records and delete old ones, until `close` or cancellation."""
        self._running = asyncio.current_task()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write_for_ever(), name="write usage")
            tasks.create_task(self._retain(), name="delete old usage")

    async def close(self) -> None:
        """End `run` and write the rest within CLOSE_S; log the number of lost records."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,), timeout=CLOSE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._close_batch():
                    await self._write_closed()
        self._ended = True
        self._close_batch()
        if left := self.pending:
            self._closed.clear()
            self._metrics.usage_records_lost.add((), left)
            reason = self._outage or "the database does not answer"
            log.error("%d usage records are lost, which the access log has: %s", left, reason)

    @property
    def pending(self) -> int:
        """Number of records not confirmed to be in the database."""
        return len(self._open.records) + sum(len(batch.records) for batch in self._closed)

    # For budgets, which count every record once

    def watch(self, listener: RecordListener) -> None:
        """Set a function that is called with every record, also with dropped ones."""
        self._listener = listener

    def unwritten(self) -> Iterator[tuple[int, EndedRequest]]:
        """Yield the requests not confirmed to be in the database, each with its batch."""
        for batch in (*self._closed, self._open):
            for ended in batch.records:
                yield batch.number, ended

    def newest_row(self) -> ScalarSelect[str]:
        """Return SQL for the newest row of this gateway, whose batch and all before are stored."""
        column = usage_records.c.id
        mine = column.between(f"{self._gateway}{'0' * 16}", f"{self._gateway}{'f' * 16}")
        return select(column).where(mine).order_by(column.desc()).limit(1).scalar_subquery()

    # Writing

    def _close_batch(self) -> bool:
        """Close the open batch unless it is empty; return whether there is one to write."""
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
            self._close_batch()
            await self._write_closed()

    async def _write_closed(self) -> None:
        """Write every closed batch in order, retrying until the database answers."""
        pause_s, longest_s = RETRY_S
        while self._closed:
            batch = self._closed[0]
            try:
                if batch.rejected:
                    await self._drop_rejected(batch)
                if batch.records:
                    await self._database.transact(partial(self._write, batch), Lane.BACKGROUND)
            except ValuesRejected as error:
                fault: Exception = error
            except DatabaseUnavailable as error:
                self._metrics.ledger_errors.add()
                if self._outage is None:
                    most = self._max_waiting
                    log.error("usage waits in memory, %d records at most: %s", most, error)
                self._outage = error
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, longest_s)
                continue
            except Exception as error:  # noqa: BLE001 - caused by an invalid record
                fault = error
            else:
                self._closed.popleft()
                self.written = batch.number
                pause_s = RETRY_S[0]
                continue
            self._metrics.ledger_errors.add()
            if not batch.rejected:
                batch.rejected = True
                continue
            self._closed.popleft()
            self._drop(len(batch.records), fault)
        if self._outage or self._lost:
            log.warning("usage ledger available again; %d records were lost", self._lost)
            self._outage = None
            self._lost = 0

    def _write(self, batch: _Batch, connection: Connection) -> None:
        """Write a batch unless it is already stored. Raises SQLAlchemyError."""
        if batch.tried:
            first = usage_records.c.id == row_id(self._gateway, batch.number)
            if connection.scalar(select(usage_records.c.id).where(first)) is not None:
                return
        batch.tried = True
        sums = DailySums()
        for place in range(0, len(batch.records), GROUP):
            records = batch.records[place : place + GROUP]
            rows = rows_of(self._gateway, batch.number, records, self._prices, place)
            sums.add(rows)
            insert_records(connection, rows)
        add_sums(connection, sums)

    async def _drop_rejected(self, batch: _Batch) -> None:
        """Remove rejected records from a batch by bisection. Raises DatabaseError."""
        records = batch.records
        find = partial(self._find_accepted, batch.number, records)
        batch.records, reason = await self._database.transact(find, Lane.BACKGROUND)
        if reason is not None:
            self._drop(len(records) - len(batch.records), reason)

    def _find_accepted(
        self, batch: int, records: Sequence[EndedRequest], connection: Connection
    ) -> tuple[list[EndedRequest], Exception | None]:
        """Return the records that can be written, and why others cannot, if there are any."""
        good = list[EndedRequest]()
        groups = deque(records[at : at + GROUP] for at in range(0, len(records), GROUP))
        reason: Exception | None = None
        tries = 0
        while groups:
            group = groups.popleft()
            tries += 1
            try:
                with connection.begin_nested() as savepoint:
                    insert_records(connection, rows_of(self._gateway, batch, group, self._prices))
                    savepoint.rollback()
                good += group
            except Exception as error:
                if isinstance(error, SQLAlchemyError) and not is_rejection(error):
                    raise
                reason = error
                if len(group) > 1 and tries < MAX_TRIES:
                    half = len(group) // 2
                    groups.extendleft((group[half:], group[:half]))
        return good, reason

    def _drop(self, records: int, fault: Exception) -> None:
        """Count records that the database rejects as lost."""
        reason = getattr(fault, "orig", fault)  # without the statement and its parameters
        log.error("%d usage records dropped: %s", records, reason)
        self._lost += records
        self._metrics.usage_records_lost.add((), records)

    def _overflow(self) -> None:
        if not self._lost:
            log.error("usage ledger is full: new records are dropped")
        self._lost += 1
        self._metrics.usage_records_lost.add()

    # Retention

    async def _retain(self) -> None:
        while True:
            with contextlib.suppress(DatabaseError):  # retried in the next round
                await self.delete_old()
            await asyncio.sleep(RETENTION_EVERY_S)

    async def delete_old(self) -> int:
        """Delete records beyond the retention period; return their number.

        Raises DatabaseError.
        """
        before_ms = int((self._clock() - self._retention_s) * 1000)
        table = usage_records.c
        return await delete_before(self._database, table.id, table.at_ms, before_ms)
