"""Budgets of keys and owners in tokens by day and month, UTC, over all gateways of a database.

A token of a prompt counts, cached or not, and so does one of an answer. What this gateway spends
counts at the moment it does. What other gateways spend shows when the database is read again, at
most STALE_S later and as long as a batch waits to be written: by that much a budget can be
overshot. While the database is down, keys that were in use go on with what is known of them.

A request of a key whose owner has a budget too is held by both accounts or by neither: between the
look at the first and the reservation in the last nothing is awaited.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from types import TracebackType
from typing import Any, Protocol, Self

from sqlalchemy import Select, case, func, select

from app.database import Database, DatabaseError
from app.database.schema import usage_by_owner, usage_daily
from app.errors import ServiceUnavailable
from app.usage.ledger import Ledger
from app.usage.records import UsageRecord, batch_of, day_of, kept, tokens_of
from app.usage.spending import (
    Period,
    Reading,
    Spending,
    Subject,
    left_of,
    longer,
    refusal,
    share_of,
    too_full,
)

log = logging.getLogger(__name__)

# An account in use is read again behind its requests when it was read so long ago,
REFRESH_S = 1.0
# and a request waits for that, though not for long, when it was read so long ago.
STALE_S = 2.0
WAIT_S = 0.25
# How long the first request of an account waits: the database's own deadline, and some of another.
FIRST_WAIT_S = 3.0
# Accounts nobody used for so long are forgotten.
FORGET_S = 60.0
# What part of a budget is nearly all of it.
NEARLY = 0.9
# Accounts of one statement.
READ_AT_ONCE = 500
# Where the sums of each kind of account are, and how long its name may be there.
_SUMS: Mapping[Subject, tuple[Any, int]] = {
    "key": (usage_daily.c.key_id, 64),
    "owner": (usage_by_owner.c.owner, 200),
}


class Owner(Protocol):
    """The owner of a key, whose budgets are for all its keys together."""

    @property
    def name(self) -> str: ...
    @property
    def daily_tokens(self) -> int | None: ...
    @property
    def monthly_tokens(self) -> int | None: ...


class Watch(Protocol):
    """What is told of accounts with a budget. It returns at once."""

    def spent(self, account: "Account", batch: int, day: str) -> None:
        """Note that an account spent something on a day, in the database with a batch."""

    def refused(self, account: "Account", period: Period, day: str) -> None:
        """Note that a request was refused on a day since too little of a budget is left."""


class Account:
    """What a key or an owner in use has spent, and may."""

    __slots__ = (
        "daily", "monthly", "name", "read_at", "reading", "spending", "subject", "used_at",
    )  # fmt: skip

    def __init__(self, subject: Subject, name: str) -> None:
        self.subject = subject
        self.name = name
        self.spending = Spending()
        self.daily: int | None = None  # budgets, as they were when it was used last
        self.monthly: int | None = None
        self.used_at = 0.0
        self.read_at = -math.inf
        self.reading: asyncio.Future[None] | None = None  # done when it was read, or could not be


class BudgetReservation:
    """What a request may take, held by each of its accounts until the context is left.

    The ledger counts from its record on. So leave the context and add the record to the ledger in
    the same turn of the loop, in whichever order: then it is counted once at every moment.
    """

    __slots__ = ("_left", "_spendings", "_tokens")

    def __init__(self, spendings: Iterable[Spending], tokens: int) -> None:
        self._spendings = tuple(spendings)
        self._tokens = 0
        self._left = False
        self.settle(tokens)

    @property
    def tokens(self) -> int:
        """How many tokens are held."""
        return self._tokens

    def settle(self, tokens: int) -> None:
        """Hold what the request took in place of what it might have taken."""
        if not self._left:
            for spending in self._spendings:
                spending.held += tokens - self._tokens
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
    """Reserves tokens of keys and owners that have a budget."""

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        clock: Callable[[], float] = time.time,
        watch: Watch | None = None,
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._clock = clock
        self._watch = watch
        self._keys: dict[str, Account] = {}
        self._owners: dict[str, Account] = {}
        self._due: list[Account] = []
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
        owner: Owner | None = None,
    ) -> BudgetReservation:
        """Hold tokens of the budgets of a key and its owner; leave the reservation's context.

        None is no budget. `elastic` is for a request that does not say how much it takes: the least
        and the most that it can do with. It holds a share of what is left, `tokens` where that is
        less (`share_of`). Raises QuotaUsedUp, whose retry_after_s are whole seconds to the next UTC
        day or month (None where the budget itself is too small), and ServiceUnavailable if the
        database could not be read for this key.
        """
        now = self._clock()
        accounts: list[Account] = []
        shared = None if owner is None else (owner.daily_tokens, owner.monthly_tokens)
        if shared is None or shared == (None, None) or (daily, monthly) != (None, None):
            accounts.append(self._account(self._keys, "key", key_id, daily, monthly, now))
        if owner is not None and shared is not None and shared != (None, None):
            accounts.append(self._account(self._owners, "owner", owner.name, *shared, now))
        outdated = [one for one in accounts if not 0 <= now - one.read_at < REFRESH_S]
        if outdated:
            await self._refresh(outdated, now)
            now = self._clock()
        # From here on nothing is awaited: every account holds the tokens, or none does.
        if not all(one.spending.known for one in accounts):
            raise ServiceUnavailable("what this key has spent cannot be read now; try again")
        day = day_of(now)
        spent = [one.spending.spent(day) for one in accounts]
        if elastic is not None:
            least, most = elastic
            left = min(
                map(left_of, spent, [a.daily for a in accounts], [a.monthly for a in accounts])
            )
            tokens = max(share_of(left, tokens, most), least)
        refused = None
        for account, so_far in zip(accounts, spent, strict=True):
            budgets = account.daily, account.monthly
            refused = longer(refused, refusal(so_far, day, now, *budgets, tokens, account.subject))
            if refused is not None and self._watch is not None:
                for period in too_full(so_far, *budgets, tokens):
                    self._watch.refused(account, period, day)
        if refused is not None:
            raise refused
        return BudgetReservation([one.spending for one in accounts], tokens)

    def used_up(self) -> Iterator[tuple[str, int, int]]:
        """Return, for day and month, how many accounts have used NEARLY of a budget, and how many
        all.

        Of the accounts in use: keys that asked within FORGET_S, and their owners. Tokens held for
        requests under way do not count, nor do budgets of 0, which are meant to be used up.
        """
        now = self._clock()
        day = day_of(now)
        shares: dict[str, list[float]] = {"day": [], "month": []}
        for account in chain(self._keys.values(), self._owners.values()):
            if account.spending.known and 0 <= now - account.used_at < FORGET_S:
                spent, held = account.spending.spent(day), account.spending.held
                if account.daily:
                    shares["day"].append((spent.today - held) / account.daily)
                if account.monthly:
                    shares["month"].append((spent.month - held) / account.monthly)
        for window, used in shares.items():
            yield window, sum(one >= NEARLY for one in used), sum(one >= 1 for one in used)

    async def close(self) -> None:
        """End the reading of the database."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait((self._reader,))

    def _account(
        self,
        known: dict[str, Account],
        subject: Subject,
        name: str,
        daily: int | None,
        monthly: int | None,
        now: float,
    ) -> Account:
        """Return an account as it is used now; a new one counts what the ledger has not written."""
        account = known.get(name)
        new = account is None
        if account is None:
            self._sweep()
            account = known[name] = Account(subject, name)
            for batch, at_s, record in self._ledger.unwritten():
                if (record.key_id if subject == "key" else record.owner) == name:
                    account.spending.record(batch, day_of(at_s), tokens_of(record.usage))
        account.used_at = now
        account.daily, account.monthly = daily, monthly
        if new and self._watch is not None:
            # A gateway before this one may have ended before its watch looked.
            self._watch.spent(account, 0, day_of(now))
        return account

    def _note(self, batch: int, at_s: float, record: UsageRecord) -> None:
        if record.usage is None:
            return
        if (key := self._keys.get(record.key_id)) is not None:
            self._count(key, batch, at_s, record)
        if record.owner and (owner := self._owners.get(record.owner)) is not None:
            self._count(owner, batch, at_s, record)

    def _count(self, account: Account, batch: int, at_s: float, record: UsageRecord) -> None:
        day = day_of(at_s)
        account.spending.record(batch, day, tokens_of(record.usage))
        if self._watch is not None:
            self._watch.spent(account, batch, day)

    def _sweep(self) -> None:
        """Forget the accounts that nobody uses, but not while they could not be read again."""
        now = self._clock()
        if 0 <= now - self._swept_at < FORGET_S or self._failed_at != -math.inf:
            return
        self._swept_at = now
        for accounts in (self._keys, self._owners):
            for name, one in list(accounts.items()):
                if not (0 <= now - one.used_at < FORGET_S or one.spending.held or one.reading):
                    del accounts[name]

    # Reading

    async def _refresh(self, accounts: Iterable[Account], now: float) -> None:
        """Have accounts read, and wait for that as long as it is worth."""
        failing = 0 <= now - self._failed_at < REFRESH_S
        wait_s = 0.0
        for account in accounts:
            if account.reading is None:
                if failing:
                    continue
                account.reading = asyncio.get_running_loop().create_future()
                self._due.append(account)
            if not account.spending.known:
                wait_s = FIRST_WAIT_S
            elif not 0 <= now - account.read_at < STALE_S and self._failed_at == -math.inf:
                wait_s = max(wait_s, WAIT_S)
        if self._due and (self._reader is None or self._reader.done()):
            self._reader = asyncio.create_task(self._read_due(), name="read budgets")
        if wait_s:
            waiting = [one.reading for one in accounts if one.reading is not None]
            await asyncio.wait(waiting, timeout=wait_s)

    async def _read_due(self) -> None:
        """Read the accounts that are due, many in one statement, until none is."""
        while self._due:
            accounts, self._due = self._due[:READ_AT_ONCE], self._due[READ_AT_ONCE:]
            now = self._clock()
            try:
                readings = await self._read(accounts, day_of(now))
                for account, reading in zip(accounts, readings, strict=True):
                    account.spending.read(reading)
                    account.read_at = now
            except Exception as error:  # whatever it is: a reader that ended would tell nobody
                if self._failed_at == -math.inf:
                    trace = None if isinstance(error, DatabaseError) else error
                    told = "budgets go on with what is known of them: %s"
                    log.warning(told, error, exc_info=trace)
                self._failed_at = self._clock()
            else:
                self._failed_at = -math.inf
            finally:
                for account in accounts:
                    assert account.reading is not None
                    account.reading.set_result(None)
                    account.reading = None

    async def _read(self, accounts: Iterable[Account], day: str) -> list[Reading]:
        """Return what the database says of each account. Raises DatabaseUnavailable."""
        found: dict[tuple[Subject, str], Reading] = {}
        async with self._database.read() as connection:
            for subject, (column, longest) in _SUMS.items():
                names = {kept(a.name, longest): a.name for a in accounts if a.subject == subject}
                if not names:
                    continue
                written = self._ledger.written
                rows = (await connection.execute(self._sums_of(column, names, day))).all()
                if rows and rows[0][3] is not None:
                    written = max(written, batch_of(rows[0][3]))
                sums: dict[str, dict[str, int]] = {name: {} for name in names.values()}
                for name, of, tokens, _ in rows:
                    sums[names[name]][of] = int(tokens)
                found |= {(subject, name): Reading(days, written) for name, days in sums.items()}
        return [found[account.subject, account.name] for account in accounts]

    def _sums_of(self, column: Any, names: Iterable[str], day: str) -> Select[Any]:
        table, month = column.table, day[:7]
        # Days to come have sums of their own: midnight may be near.
        days = case((table.c.day < day, f"{month}-00"), else_=table.c.day)
        tokens = func.sum(table.c.prompt_tokens + table.c.completion_tokens)
        return (
            select(column, days.label("of"), tokens, self._ledger.newest_row())
            .where(column.in_(list(names)), table.c.day >= f"{month}-01")
            .group_by(column, "of")
        )
