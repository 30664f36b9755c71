"""Token budgets of keys and owners per UTC day and month, across all gateways of a database.

Prompt tokens, cached or not, and completion tokens count. Spending of this gateway counts at once;
that of other gateways after the next read of the database, at most STALE_S and the delay of a batch
later: by that much a budget can be overshot. While the database is down, keys in use continue with
the last known sums.

A request of a key whose owner has a budget too is reserved in both accounts or in neither: between
the check of the first and the reservation in the last nothing is awaited.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import TracebackType
from typing import Any, Protocol, Self

from sqlalchemy import Select, case, func, select

from app.database import Database, DatabaseError
from app.deadline import deadline
from app.errors import ServiceUnavailable
from app.usage.ledger import Ledger
from app.usage.records import UsageRecord, batch_of, day_of, storable, tokens_of
from app.usage.spending import (
    BudgetSubject,
    DatabaseSums,
    Period,
    Spending,
    elastic_share,
    exceeded_periods,
    longer_refusal,
    refusal,
    remaining_tokens,
)
from app.usage.statements import ACCOUNT_COLUMNS

log = logging.getLogger(__name__)

# Age of the sums after which an account in use is read again in the background.
REFRESH_S = 1.0
# Age of the sums after which requests wait for that read, for up to WAIT_S.
STALE_S = 2.0
WAIT_S = 0.25
# Maximum wait of an account's first request: the database's deadline, and a part of another.
FIRST_WAIT_S = 3.0
# Idle time after which an account is forgotten.
FORGET_S = 60.0
# Share at which a budget is nearly used up.
NEARLY = 0.9
# Accounts per statement.
READ_BATCH = 500


class BudgetOwner(Protocol):
    """The owner of a key, whose budgets all its keys share."""

    @property
    def name(self) -> str: ...
    @property
    def daily_tokens(self) -> int | None: ...
    @property
    def monthly_tokens(self) -> int | None: ...


class SpendingListener(Protocol):
    """Receives events of accounts with a budget. Its methods return at once."""

    def spent(self, account: "BudgetAccount", batch: int, day: str) -> None:
        """An account spent tokens on a day, which are written with a batch."""

    def refused(self, account: "BudgetAccount", period: Period, day: str) -> None:
        """A request was refused on a day because of earlier spending."""


class BudgetAccount:
    """The spending and the budgets of a key or an owner in use."""

    __slots__ = (
        "daily", "monthly", "name", "read_at", "reading", "spending", "subject", "used_at",
    )  # fmt: skip

    def __init__(self, subject: BudgetSubject, name: str) -> None:
        self.subject = subject
        self.name = name
        self.spending = Spending()
        self.daily: int | None = None  # budgets as of the last use
        self.monthly: int | None = None
        self.used_at = 0.0
        self.read_at = -math.inf
        self.reading: asyncio.Future[None] | None = None  # done when a read ends, also if it fails


class BudgetReservation:
    """The tokens reserved for a request in each of its accounts, until the context exits.

    The ledger counts a request from its record on. So exit the context and add the record in the
    same turn of the event loop, in any order: then the request is counted exactly once.
    """

    __slots__ = ("_exited", "_spendings", "_tokens")

    def __init__(self, spendings: Iterable[Spending], tokens: int) -> None:
        self._spendings = tuple(spendings)
        self._tokens = 0
        self._exited = False
        self.settle(tokens)

    @property
    def tokens(self) -> int:
        """Number of reserved tokens."""
        return self._tokens

    def settle(self, tokens: int) -> None:
        """Replace the reserved tokens by the used ones."""
        if not self._exited:
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
        self._exited = True


class Budgets:
    """Reserves tokens of keys and owners that have a budget."""

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        clock: Callable[[], float] = time.time,
        listener: SpendingListener | None = None,
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._clock = clock
        self._listener = listener
        self._keys: dict[str, BudgetAccount] = {}
        self._owners: dict[str, BudgetAccount] = {}
        self._due: list[BudgetAccount] = []
        self._reader: asyncio.Task[None] | None = None
        self._failed_at = -math.inf  # when the database could not be read, since it last could
        self._forgot_at = -math.inf
        ledger.watch(self._on_record)

    async def reserve(
        self,
        key_id: str,
        daily: int | None,
        monthly: int | None,
        tokens: int,
        elastic: tuple[int, int] | None = None,
        owner: BudgetOwner | None = None,
    ) -> BudgetReservation:
        """Reserve tokens in the budgets of a key and its owner; exit the returned context.

        None is no budget. `elastic` is for a request without a token limit: the least and the most
        tokens that it can use. It reserves a share of what is left, or `tokens` if that is less
        (`elastic_share`). Raises QuotaUsedUp, whose retry_after_s are whole seconds to the next
        UTC day or month (None if the budget itself is too small), and ServiceUnavailable if the
        key's spending could not be read.
        """
        now = self._clock()
        accounts: list[BudgetAccount] = []
        shared = None if owner is None else (owner.daily_tokens, owner.monthly_tokens)
        if shared is None or shared == (None, None) or (daily, monthly) != (None, None):
            accounts.append(self._account(self._keys, "key", key_id, daily, monthly, now))
        if owner is not None and shared is not None and shared != (None, None):
            accounts.append(self._account(self._owners, "owner", owner.name, *shared, now))
        outdated = [one for one in accounts if not 0 <= now - one.read_at < REFRESH_S]
        if outdated:
            await self._refresh(outdated, now)
            now = self._clock()
        # From here on nothing is awaited: every account reserves the tokens, or none does.
        if not all(one.spending.known for one in accounts):
            raise ServiceUnavailable("what this key has spent cannot be read now; try again")
        day = day_of(now)
        spent = [one.spending.spent(day) for one in accounts]
        if elastic is not None:
            least, most = elastic
            left = min(
                map(
                    remaining_tokens,
                    spent,
                    [a.daily for a in accounts],
                    [a.monthly for a in accounts],
                )
            )
            tokens = max(elastic_share(left, tokens, most), least)
        refused = None
        for account, so_far in zip(accounts, spent, strict=True):
            budgets = account.daily, account.monthly
            refused = longer_refusal(
                refused, refusal(so_far, day, now, *budgets, tokens, account.subject)
            )
            if refused is not None and self._listener is not None:
                for period in exceeded_periods(so_far, *budgets, tokens):
                    self._listener.refused(account, period, day)
        if refused is not None:
            raise refused
        return BudgetReservation([one.spending for one in accounts], tokens)

    def usage_levels(self) -> Iterator[tuple[str, int, int]]:
        """Yield for day and month how many accounts have used NEARLY of a budget, and all of it.

        Only accounts in use count: keys with requests within FORGET_S, and their owners.
        Reservations do not count, nor do budgets of 0, which are meant to be used up.
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
        """Cancel reads of the database."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait((self._reader,))

    def _account(
        self,
        known: dict[str, BudgetAccount],
        subject: BudgetSubject,
        name: str,
        daily: int | None,
        monthly: int | None,
        now: float,
    ) -> BudgetAccount:
        """Return an account with its current budgets; a new one counts unwritten records."""
        account = known.get(name)
        new = account is None
        if account is None:
            self._forget_idle()
            account = known[name] = BudgetAccount(subject, name)
            for batch, at_s, record in self._ledger.unwritten():
                if (record.key_id if subject == "key" else record.owner) == name:
                    account.spending.record(batch, day_of(at_s), tokens_of(record.usage))
        account.used_at = now
        account.daily, account.monthly = daily, monthly
        if new and self._listener is not None:
            # An earlier process may have ended before its listener checked the account.
            self._listener.spent(account, 0, day_of(now))
        return account

    def _on_record(self, batch: int, at_s: float, record: UsageRecord) -> None:
        if record.usage is None:
            return
        if (key := self._keys.get(record.key_id)) is not None:
            self._count(key, batch, at_s, record)
        if record.owner and (owner := self._owners.get(record.owner)) is not None:
            self._count(owner, batch, at_s, record)

    def _count(self, account: BudgetAccount, batch: int, at_s: float, record: UsageRecord) -> None:
        day = day_of(at_s)
        account.spending.record(batch, day, tokens_of(record.usage))
        if self._listener is not None:
            self._listener.spent(account, batch, day)

    def _forget_idle(self) -> None:
        """Forget idle accounts, but not while the database is down: they could not be reloaded."""
        now = self._clock()
        if 0 <= now - self._forgot_at < FORGET_S or self._failed_at != -math.inf:
            return
        self._forgot_at = now
        for accounts in (self._keys, self._owners):
            for name, one in list(accounts.items()):
                if not (0 <= now - one.used_at < FORGET_S or one.spending.held or one.reading):
                    del accounts[name]

    # Sums of the database

    async def _refresh(self, accounts: Iterable[BudgetAccount], now: float) -> None:
        """Start reading accounts, and wait according to the age of their sums."""
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
            with contextlib.suppress(TimeoutError):
                async with deadline(asyncio.get_running_loop().time() + wait_s):
                    await asyncio.wait(waiting)

    async def _read_due(self) -> None:
        """Read all due accounts, many per statement."""
        while self._due:
            accounts, self._due = self._due[:READ_BATCH], self._due[READ_BATCH:]
            now = self._clock()
            try:
                readings = await self._read(accounts, day_of(now))
                for account, reading in zip(accounts, readings, strict=True):
                    account.spending.read(reading)
                    account.read_at = now
            except Exception as error:  # the reader must not end silently
                if self._failed_at == -math.inf:
                    trace = None if isinstance(error, DatabaseError) else error
                    message = "budgets not read, the last known sums apply: %s"
                    log.warning(message, error, exc_info=trace)
                self._failed_at = self._clock()
            else:
                self._failed_at = -math.inf
            finally:
                for account in accounts:
                    assert account.reading is not None
                    account.reading.set_result(None)
                    account.reading = None

    async def _read(self, accounts: Iterable[BudgetAccount], day: str) -> list[DatabaseSums]:
        """Read the sums of each account. Raises DatabaseError."""
        found: dict[tuple[BudgetSubject, str], DatabaseSums] = {}
        for subject, (column, longest) in ACCOUNT_COLUMNS.items():
            names = {storable(a.name, longest): a.name for a in accounts if a.subject == subject}
            if not names:
                continue
            written = self._ledger.written
            rows = await self._database.fetch(self._sums_query(column, names, day))
            if rows and rows[0][3] is not None:
                written = max(written, batch_of(rows[0][3]))
            sums: dict[str, dict[str, int]] = {name: {} for name in names.values()}
            for name, of, tokens, _ in rows:
                sums[names[name]][of] = int(tokens)
            found |= {(subject, name): DatabaseSums(days, written) for name, days in sums.items()}
        return [found[account.subject, account.name] for account in accounts]

    def _sums_query(self, column: Any, names: Iterable[str], day: str) -> Select[Any]:
        table, month = column.table, day[:7]
        # Future days have sums of their own: midnight may be near.
        days = case((table.c.day < day, f"{month}-00"), else_=table.c.day)
        tokens = func.sum(table.c.prompt_tokens + table.c.completion_tokens)
        return (
            select(column, days.label("of"), tokens, self._ledger.newest_row())
            .where(column.in_(list(names)), table.c.day >= f"{month}-01")
            .group_by(column, "of")
        )
