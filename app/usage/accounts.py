"""The accounts of keys and owners in use: their budgets, and what they have spent.

Spending of this gateway counts at once; that of other gateways after the next read of the database,
at most STALE_S and the delay of a batch later: by that much a budget can be overshot. While the
database is down, keys in use continue with the last known sums.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from sqlalchemy import Select, case, func, select

from app.database import Database, DatabaseError
from app.deadline import deadline
from app.telemetry import EndedRequest, Tokens
from app.usage.ledger import Ledger
from app.usage.records import Price, batch_of, day_of, storable, tokens_of
from app.usage.spending import MEASURES, BudgetKind, BudgetSubject, DatabaseSums, Measure, Spending
from app.usage.statements import ACCOUNT_COLUMNS, cost_of, cost_sums

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
# Accounts per statement.
READ_BATCH = 500


class BudgetHolder(Protocol):
    """The budgets of a key or an owner, in tokens and in nano of the currency; None: no budget."""

    @property
    def daily_tokens(self) -> int | None: ...
    @property
    def monthly_tokens(self) -> int | None: ...
    @property
    def daily_cost_nano(self) -> int | None: ...
    @property
    def monthly_cost_nano(self) -> int | None: ...


class BudgetOwner(BudgetHolder, Protocol):
    """The owner of a key, whose budgets all its keys share."""

    @property
    def name(self) -> str: ...
    @property
    def has_budget(self) -> bool: ...


class BudgetKey(BudgetHolder, Protocol):
    """A key, and its owner with a record."""

    @property
    def id(self) -> str: ...
    @property
    def owner(self) -> BudgetOwner | None: ...


class SpendingListener(Protocol):
    """Receives events of accounts with a budget."""

    def note(
        self, account: "BudgetAccount", batch: int, day: str, refused: Collection[BudgetKind] = ()
    ) -> None:
        """Note what an account spent on a day, in the database with a batch. Returns at once.

        `refused`: budgets that have refused a request because of earlier spending.
        """


@dataclass(eq=False, slots=True)
class BudgetAccount:
    """The spending and the budgets of a key or an owner in use."""

    subject: BudgetSubject
    name: str
    holder: BudgetHolder
    has_cost_budget: bool = field(init=False)
    spending: dict[Measure, Spending] = field(
        default_factory=lambda: {"tokens": Spending(), "cost": Spending()}
    )
    used_at: float = 0.0
    read_at: float = -math.inf
    reading: asyncio.Future[None] | None = None  # done when a read ends, also if it fails

    def __post_init__(self) -> None:
        self.apply(self.holder)

    @property
    def known(self) -> bool:
        return self.spending["tokens"].known

    @property
    def held(self) -> bool:
        """True while something is reserved."""
        return any(one.held for one in self.spending.values())

    def apply(self, holder: BudgetHolder) -> None:
        """Set the budgets, as of a use."""
        self.holder = holder
        self.has_cost_budget = self.budgets("cost") != (None, None)

    def budgets(self, measure: Measure) -> tuple[int | None, int | None]:
        """Return the daily and the monthly budget; None: there is none."""
        holder = self.holder
        if measure == "tokens":
            return holder.daily_tokens, holder.monthly_tokens
        return holder.daily_cost_nano, holder.monthly_cost_nano

    def count(self, batch: int, day: str, usage: Tokens | None, price: Price | None) -> None:
        """Count the usage of a request that is written with a batch."""
        self.spending["tokens"].record(batch, day, tokens_of(usage))
        if price is not None and usage is not None:
            self.spending["cost"].record(batch, day, price.cost(usage))


@dataclass(eq=False)
class BudgetAccounts:
    """The accounts in use. They follow the ledger, and the sums of the database."""

    database: Database
    ledger: Ledger
    clock: Callable[[], float]
    listener: SpendingListener | None
    keys: dict[str, BudgetAccount] = field(default_factory=dict)
    owners: dict[str, BudgetAccount] = field(default_factory=dict)
    due: list[BudgetAccount] = field(default_factory=list)
    reader: asyncio.Task[None] | None = None
    failed_at: float = -math.inf  # when the database could not be read, since it last could
    forgot_at: float = -math.inf

    def __iter__(self) -> Iterator[BudgetAccount]:
        return chain(self.keys.values(), self.owners.values())

    async def use(self, key: BudgetKey, now: float) -> list[BudgetAccount]:
        """Return the accounts of a key's and its owner's budgets, that of the key if it has none.

        Waits for their sums as long as these are too old. An account is not `known` where the
        database could not be read.
        """
        accounts: list[BudgetAccount] = []
        owner = key.owner
        shared = owner is not None and owner.has_budget
        budgets = (key.daily_tokens, key.monthly_tokens, key.daily_cost_nano, key.monthly_cost_nano)
        if not shared or any(budget is not None for budget in budgets):
            accounts.append(self._account(self.keys, "key", key.id, key, now))
        if owner is not None and shared:
            accounts.append(self._account(self.owners, "owner", owner.name, owner, now))
        outdated = [one for one in accounts if not 0 <= now - one.read_at < REFRESH_S]
        if outdated:
            await self._refresh(outdated, now)
        return accounts

    async def close(self) -> None:
        if self.reader is not None:
            self.reader.cancel()
            await asyncio.wait((self.reader,))

    def _account(
        self,
        known: dict[str, BudgetAccount],
        subject: BudgetSubject,
        name: str,
        holder: BudgetHolder,
        now: float,
    ) -> BudgetAccount:
        """Return an account with its current budgets; a new one counts unwritten records."""
        account = known.get(name)
        new = account is None
        if account is None:
            self._forget_idle()
            self.ledger.watch(self._on_record)  # not before: most gateways have no budgets
            account = known[name] = BudgetAccount(subject, name, holder)
            for batch, ended in self.ledger.unwritten():
                record = ended.record
                if (record.key_id if subject == "key" else record.owner) == name:
                    price = self.ledger.price_of(record.model)
                    account.count(batch, day_of(ended.ended_at), record.usage, price)
        account.used_at = now
        if account.holder is not holder:
            account.apply(holder)
        if new and self.listener is not None:
            # An earlier process may have ended before its listener checked the account.
            self.listener.note(account, 0, day_of(now))
        return account

    def _on_record(self, batch: int, ended: EndedRequest) -> None:
        record = ended.record
        if record.usage is None:
            return
        if (key := self.keys.get(record.key_id)) is not None:
            self._count(key, batch, ended)
        if record.owner and (owner := self.owners.get(record.owner)) is not None:
            self._count(owner, batch, ended)

    def _count(self, account: BudgetAccount, batch: int, ended: EndedRequest) -> None:
        day, record = day_of(ended.ended_at), ended.record
        account.count(batch, day, record.usage, self.ledger.price_of(record.model))
        if self.listener is not None:
            self.listener.note(account, batch, day)

    def _forget_idle(self) -> None:
        """Forget idle accounts, but not while the database is down: they could not be reloaded."""
        now = self.clock()
        if 0 <= now - self.forgot_at < FORGET_S or self.failed_at != -math.inf:
            return
        self.forgot_at = now
        for accounts in (self.keys, self.owners):
            for name, one in list(accounts.items()):
                if not (0 <= now - one.used_at < FORGET_S or one.held or one.reading):
                    del accounts[name]

    # Sums of the database

    async def _refresh(self, accounts: Iterable[BudgetAccount], now: float) -> None:
        """Start reading accounts, and wait according to the age of their sums."""
        failing = 0 <= now - self.failed_at < REFRESH_S
        wait_s = 0.0
        for account in accounts:
            if account.reading is None:
                if failing:
                    continue
                account.reading = asyncio.get_running_loop().create_future()
                self.due.append(account)
            if not account.known:
                wait_s = FIRST_WAIT_S
            elif not 0 <= now - account.read_at < STALE_S and self.failed_at == -math.inf:
                wait_s = max(wait_s, WAIT_S)
        if self.due and (self.reader is None or self.reader.done()):
            self.reader = asyncio.create_task(self._read_due(), name="read budgets")
        if wait_s:
            waiting = [one.reading for one in accounts if one.reading is not None]
            with contextlib.suppress(TimeoutError):
                async with deadline(asyncio.get_running_loop().time() + wait_s):
                    await asyncio.wait(waiting)

    async def _read_due(self) -> None:
        """Read all due accounts, many per statement."""
        while self.due:
            accounts, self.due = self.due[:READ_BATCH], self.due[READ_BATCH:]
            now = self.clock()
            try:
                readings = await self._read(accounts, day_of(now))
                for account, reading in zip(accounts, readings, strict=True):
                    for measure in MEASURES:
                        account.spending[measure].read(reading[measure])
                    account.read_at = now
            except Exception as error:  # the reader must not end silently
                if self.failed_at == -math.inf:
                    trace = None if isinstance(error, DatabaseError) else error
                    message = "budgets not read, the last known sums apply: %s"
                    log.warning(message, error, exc_info=trace)
                self.failed_at = self.clock()
            else:
                if self.failed_at != -math.inf:
                    self.failed_at = -math.inf
                    log.info("budgets are read again")
            finally:
                for account in accounts:
                    assert account.reading is not None
                    account.reading.set_result(None)
                    account.reading = None

    async def _read(
        self, accounts: Iterable[BudgetAccount], day: str
    ) -> list[dict[Measure, DatabaseSums]]:
        """Read the sums of each account. Raises DatabaseError."""
        found: dict[tuple[BudgetSubject, str], dict[Measure, DatabaseSums]] = {}
        for subject, (column, longest) in ACCOUNT_COLUMNS.items():
            names = {storable(a.name, longest): a.name for a in accounts if a.subject == subject}
            if not names:
                continue
            written = self.ledger.written
            rows = await self.database.fetch(self._sums_query(column, names, day))
            if rows and rows[0].newest is not None:
                written = max(written, batch_of(rows[0].newest))
            for name in names.values():
                found[subject, name] = {one: DatabaseSums({}, written) for one in MEASURES}
            for row in rows:
                sums = found[subject, names[row[0]]]
                sums["tokens"].days[row.of] = int(row.tokens)
                sums["cost"].days[row.of] = cost_of(row)
        return [found[account.subject, account.name] for account in accounts]

    def _sums_query(self, column: Any, names: Iterable[str], day: str) -> Select[Any]:
        table, month = column.table, day[:7]
        # Future days have sums of their own: midnight may be near.
        days = case((table.c.day < day, f"{month}-00"), else_=table.c.day)
        tokens = func.sum(table.c.prompt_tokens + table.c.completion_tokens).label("tokens")
        return (
            select(
                column,
                days.label("of"),
                tokens,
                *cost_sums(table.c.cost_nano),
                self.ledger.newest_row().label("newest"),
            )
            .where(column.in_(list(names)), table.c.day >= f"{month}-01")
            .group_by(column, "of")
        )
