"""Budgets of tokens by day and month, UTC, over all gateways that share a database.

A token of a prompt counts, cached or not, and so does one of an answer. What this gateway spends
counts at the moment it does. What other gateways spend shows when the database is read again, at
most STALE_S later and as long as a batch waits to be written: by that much a budget can be
overshot. While the database is down, keys that were in use go on with what is known of them.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from sqlalchemy import case, func, select

from app.database.database import Database, DatabaseUnavailable
from app.database.schema import usage_daily
from app.errors import ServiceUnavailable
from app.usage.ledger import Ledger
from app.usage.rows import UsageRecord, batch_of, day_of, kept, tokens_of
from app.usage.spending import Reading, Spending, left_of, refusal, share_of

log = logging.getLogger(__name__)

# A key in use is read again behind its requests when it was read so long ago,
REFRESH_S = 1.0
# and a request waits for that, though not for long, when it was read so long ago.
STALE_S = 2.0
WAIT_S = 0.25
# How long the first request of a key waits: the database's own deadline, and some of another.
FIRST_WAIT_S = 3.0
# Keys nobody used for so long are forgotten.
FORGET_S = 60.0
# What part of a budget is nearly all of it.
NEARLY = 0.9
# Keys of one statement.
READ_AT_ONCE = 500


class _Key:
    """A key in use."""

    __slots__ = ("daily", "monthly", "read_at", "reading", "spending", "used_at")

    def __init__(self) -> None:
        self.spending = Spending()
        self.daily: int | None = None  # budgets, as they were when it was used last
        self.monthly: int | None = None
        self.used_at = 0.0
        self.read_at = -math.inf
        self.reading: asyncio.Future[None] | None = None  # done when it was read, or could not be


class Reservation:
    """What a request may take, held until the context is left.

    The ledger counts from its record on. So leave the context and add the record to the ledger in
    the same turn of the loop, in whichever order: then it is counted once at every moment.
    """

    __slots__ = ("_left", "_spending", "_tokens")

    def __init__(self, spending: Spending, tokens: int) -> None:
        self._spending = spending
        self._tokens = tokens
        self._left = False
        spending.held += tokens

    @property
    def tokens(self) -> int:
        """How many tokens are held."""
        return self._tokens

    def settle(self, tokens: int) -> None:
        """Hold what the request took in place of what it might have taken."""
        if not self._left:
            self._spending.held += tokens - self._tokens
            self._tokens = tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.settle(0)
        self._left = True


class Budgets:
    """Reserves tokens of keys that have a budget."""

    def __init__(
        self, database: Database, ledger: Ledger, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._clock = clock
        self._keys: dict[str, _Key] = {}
        self._due: dict[str, _Key] = {}
        self._reader: asyncio.Task[None] | None = None
        self._failed_at = -math.inf  # when the database could not be read, since it last could
        self._swept_at = -math.inf
        ledger.watch(self._note)

    async def reserve(
        self,
        key_id: str,
        daily: int | None,
        monthly: int | None,
        tokens: int,
        elastic: tuple[int, int] | None = None,
    ) -> Reservation:
        """Hold tokens of a key's budgets, None being no budget; leave the reservation's context.

        `elastic` is for a request that does not say how much it takes: the least and the most that
        it can do with. It holds a share of what is left, `tokens` where that is less (`share_of`).
        Raises QuotaUsedUp, whose retry_after_s are whole seconds to the next UTC day or month
        (None where the budget itself is too small), and ServiceUnavailable if the database could
        not be read for this key.
        """
        now = self._clock()
        key = self._keys.get(key_id) or self._watch(key_id)
        key.used_at = now
        key.daily, key.monthly = daily, monthly
        if not 0 <= now - key.read_at < REFRESH_S:
            await self._refresh(key_id, key, now)
            now = self._clock()
        if not key.spending.known:
            raise ServiceUnavailable("what this key has spent cannot be read now; try again")
        day = day_of(now)
        spent = key.spending.spent(day)
        if elastic is not None:
            least, most = elastic
            tokens = max(share_of(left_of(spent, daily, monthly), tokens, most), least)
        refused = refusal(spent, day, now, daily, monthly, tokens)
        if refused is not None:
            raise refused
        return Reservation(key.spending, tokens)

    def used_up(self) -> Iterator[tuple[str, int, int]]:
        """Return, for day and month, how many keys have used NEARLY of a budget, and how many all.

        Of the keys in use: one that asked within FORGET_S. Tokens held for requests under way do
        not count, nor do budgets of 0, which are meant to be used up.
        """
        now = self._clock()
        day = day_of(now)
        shares: dict[str, list[float]] = {"day": [], "month": []}
        for key in self._keys.values():
            if key.spending.known and 0 <= now - key.used_at < FORGET_S:
                spent, held = key.spending.spent(day), key.spending.held
                if key.daily:
                    shares["day"].append((spent.today - held) / key.daily)
                if key.monthly:
                    shares["month"].append((spent.month - held) / key.monthly)
        for window, used in shares.items():
            yield window, sum(one >= NEARLY for one in used), sum(one >= 1 for one in used)

    async def close(self) -> None:
        """End the reading of the database."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait((self._reader,))

    def _watch(self, key_id: str) -> _Key:
        """Begin to count a key: from here on, and what the ledger has not written."""
        self._sweep()
        key = self._keys[key_id] = _Key()
        for batch, at_s, record in self._ledger.unwritten():
            if record.key_id == key_id:
                key.spending.record(batch, day_of(at_s), tokens_of(record.usage))
        return key

    def _note(self, batch: int, at_s: float, record: UsageRecord) -> None:
        if (key := self._keys.get(record.key_id)) is not None and record.usage is not None:
            key.spending.record(batch, day_of(at_s), tokens_of(record.usage))

    def _sweep(self) -> None:
        """Forget the keys that nobody uses, but not while they could not be read again."""
        now = self._clock()
        if 0 <= now - self._swept_at < FORGET_S or self._failed_at != -math.inf:
            return
        self._swept_at = now
        self._keys = {
            key_id: key
            for key_id, key in self._keys.items()
            if 0 <= now - key.used_at < FORGET_S or key.spending.held or key.reading
        }

    # Reading

    async def _refresh(self, key_id: str, key: _Key, now: float) -> None:
        """Have a key read, and wait for that as long as it is worth."""
        failing = 0 <= now - self._failed_at < REFRESH_S
        if key.reading is None and failing:
            return
        if key.reading is None:
            key.reading = asyncio.get_running_loop().create_future()
            self._due[key_id] = key
            if self._reader is None or self._reader.done():
                self._reader = asyncio.create_task(self._read_due(), name="read budgets")
        if not key.spending.known:
            await asyncio.wait((key.reading,), timeout=FIRST_WAIT_S)
        elif not 0 <= now - key.read_at < STALE_S and self._failed_at == -math.inf:
            await asyncio.wait((key.reading,), timeout=WAIT_S)

    async def _read_due(self) -> None:
        """Read the keys that are due, many in one statement, until none is."""
        while self._due:
            keys = {key_id: self._due.pop(key_id) for key_id in list(self._due)[:READ_AT_ONCE]}
            now = self._clock()
            try:
                readings = await self._read(list(keys), day_of(now))
                for key_id, key in keys.items():
                    key.spending.read(readings[key_id])
                    key.read_at = now
            except Exception as error:  # whatever it is: a reader that ended would tell nobody
                if self._failed_at == -math.inf:
                    trace = None if isinstance(error, DatabaseUnavailable) else error
                    told = "budgets go on with what is known of them: %s"
                    log.warning(told, error, exc_info=trace)
                self._failed_at = self._clock()
            else:
                self._failed_at = -math.inf
            finally:
                for key in keys.values():
                    assert key.reading is not None
                    key.reading.set_result(None)
                    key.reading = None

    async def _read(self, key_ids: Sequence[str], day: str) -> dict[str, Reading]:
        """Return what the database says of these keys. Raises DatabaseUnavailable."""
        written = self._ledger.written
        names = {kept(key_id, 64): key_id for key_id in key_ids}
        month = day[:7]
        # Days to come have sums of their own: midnight may be near.
        days = case((usage_daily.c.day < day, f"{month}-00"), else_=usage_daily.c.day)
        statement = (
            select(
                usage_daily.c.key_id,
                days.label("of"),
                func.sum(usage_daily.c.prompt_tokens + usage_daily.c.completion_tokens),
                self._ledger.newest_row(),
            )
            .where(usage_daily.c.key_id.in_(list(names)), usage_daily.c.day >= f"{month}-01")
            .group_by(usage_daily.c.key_id, "of")
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(statement)).all()
        if rows and rows[0][3] is not None:
            written = max(written, batch_of(rows[0][3]))
        sums: dict[str, dict[str, int]] = {key_id: {} for key_id in key_ids}
        for name, of, tokens, _ in rows:
            sums[names[name]][of] = int(tokens)
        return {key_id: Reading(by_day, written) for key_id, by_day in sums.items()}
