"""Budgets of keys and owners per UTC day and month, across all gateways of a database.

A budget is in tokens, where prompt tokens, cached or not, and completion tokens count, or in money,
by the prices of the models. A request reserves the most that it can use, at the highest price of a
prompt token, cached or not; its real usage replaces that at the end.

Spending of this gateway counts at once; that of other gateways after the next read of the database,
at most STALE_S and the delay of a batch later: by that much a budget can be overshot. While the
database is down, keys in use continue with the last known sums.

A request of a key whose owner has a budget too is reserved in both accounts or in neither, and so
is a request in budgets of both kinds: between the first check and the last reservation nothing is
awaited.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, Protocol, Self

from sqlalchemy import Select, case, func, select

from app.database import Database, DatabaseError
from app.deadline import deadline
from app.errors import QuotaUsedUp, ServiceUnavailable
from app.money import NANO
from app.telemetry import EndedRequest, Tokens
from app.usage.ledger import Ledger
from app.usage.records import MILLION, Price, batch_of, day_of, storable, tokens_of
from app.usage.spending import (
    MEASURES,
    BudgetSubject,
    DatabaseSums,
    Measure,
    Period,
    Spending,
    Words,
    elastic_share,
    exceeded_periods,
    longer_refusal,
    refusal,
    remaining,
)
from app.usage.statements import ACCOUNT_COLUMNS, cost_sums

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
    """Receives events of accounts with a budget. Its methods return at once."""

    def spent(self, account: "BudgetAccount", batch: int, day: str) -> None:
        """An account spent something on a day, which is written with a batch."""

    def refused(self, account: "BudgetAccount", measure: Measure, period: Period, day: str) -> None:
        """A request was refused on a day because of earlier spending."""


class BudgetAccount:
    """The spending and the budgets of a key or an owner in use."""

    __slots__ = (
        "has_cost_budget", "holder", "name", "read_at", "reading", "spending", "subject", "used_at",
    )  # fmt: skip

    def __init__(self, subject: BudgetSubject, name: str, holder: BudgetHolder) -> None:
        self.subject = subject
        self.name = name
        self.spending: dict[Measure, Spending] = {"tokens": Spending(), "cost": Spending()}
        self.apply(holder)
        self.used_at = 0.0
        self.read_at = -math.inf
        self.reading: asyncio.Future[None] | None = None  # done when a read ends, also if it fails

    @property
    def known(self) -> bool:
        """True once the database has been read."""
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


class BudgetReservation:
    """What is reserved for a request in each of its accounts, until the context exits.

    `price_of` is None where no account has a budget in money.

    The ledger counts a request from its record on. So exit the context and add the record in the
    same turn of the event loop, in any order: then the request is counted exactly once.
    """

    __slots__ = ("_exited", "_price_of", "accounts", "cost", "tokens")

    def __init__(
        self,
        accounts: Sequence[BudgetAccount],
        price_of: Callable[[str], Price | None] | None,
        tokens: int,
        cost: int,
    ) -> None:
        self.accounts = accounts
        self.tokens = 0
        self.cost = 0
        self._price_of = price_of
        self._exited = False
        self.hold(tokens, cost)

    def hold(self, tokens: int, cost: int) -> None:
        """Replace what is reserved."""
        if not self._exited:
            for account in self.accounts:
                account.spending["tokens"].held += tokens - self.tokens
                if cost != self.cost:
                    account.spending["cost"].held += cost - self.cost
            self.tokens, self.cost = tokens, cost

    def settle(self, usage: Tokens, model: str) -> None:
        """Replace what is reserved by what a model was used for."""
        price = None if self._price_of is None else self._price_of(model)
        self.hold(tokens_of(usage), 0 if price is None else price.cost(usage))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hold(0, 0)
        self._exited = True


class Budgets:
    """Reserves tokens and money of keys and owners that have a budget."""

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
        key: BudgetKey,
        tokens: int,
        elastic: tuple[int, int] | None = None,
        *,
        prompt: int = 0,
        output: int = 0,
        model: str = "",
    ) -> BudgetReservation:
        """Reserve in the budgets of a key and its owner; exit the returned context.

        `prompt` of the tokens are the prompt's, at the prices of `model`. `output` is the longest
        answer, where that is more than the rest: money is reserved for both. `elastic` is for a
        request without a token limit: the least and the most tokens that it can use. It reserves a
        share of what is left, or `tokens` if that is less (`elastic_share`). Raises QuotaUsedUp,
        whose retry_after_s are whole seconds to the next UTC day or month (None if the budget
        itself is too small), and ServiceUnavailable if the key's spending could not be read.
        """
        now = self._clock()
        accounts: list[BudgetAccount] = []
        owner = key.owner
        shared = owner is not None and owner.has_budget
        if not shared or _has_budget(key):
            accounts.append(self._account(self._keys, "key", key.id, key, now))
        if owner is not None and shared:
            accounts.append(self._account(self._owners, "owner", owner.name, owner, now))
        outdated = [one for one in accounts if not 0 <= now - one.read_at < REFRESH_S]
        if outdated:
            await self._refresh(outdated, now)
        # From here on nothing is awaited: every account reserves, or none does.
        if not all(one.known for one in accounts):
            raise ServiceUnavailable("what this key has spent cannot be read now; try again")
        price_of = None
        for account in accounts:
            if account.has_cost_budget:
                price_of = self._ledger.price_of
        price = None if price_of is None else price_of(model)
        if elastic is not None:
            tokens = self._elastic_tokens(accounts, tokens, prompt, price, *elastic)
            output = 0  # it is bounded to the rest
        cost = 0 if price is None else price.most(prompt, max(tokens - prompt, output))
        self._check(accounts, tokens, cost)
        return BudgetReservation(accounts, price_of, tokens, cost)

    def cover(
        self, reservation: BudgetReservation, *, prompt: int, output: int, model: str
    ) -> None:
        """Raise a reservation to what the request may cost at another model. Raises QuotaUsedUp."""
        price = self._ledger.price_of(model)
        if price is None or not any(one.has_cost_budget for one in reservation.accounts):
            return
        more = price.most(prompt, output) - reservation.cost
        if more > 0:
            self._check(reservation.accounts, None, more)
            reservation.hold(reservation.tokens, reservation.cost + more)

    def _elastic_tokens(
        self,
        accounts: Sequence[BudgetAccount],
        usual: int,
        prompt: int,
        price: Price | None,
        least: int,
        most: int,
    ) -> int:
        """Return the tokens to reserve for a request without a token limit."""
        tokens = most
        if (left := self._left(accounts, "tokens")) is not None:
            tokens = max(elastic_share(left, usual, most), least)
        if price is None or not price.completion:
            return tokens
        if (left := self._left(accounts, "cost")) is not None:
            usually, at_most = (price.most(prompt, one - prompt) for one in (usual, most))
            share = elastic_share(left, usually, at_most)
            answer = (share - price.most(prompt, 0)) * MILLION // price.completion
            tokens = min(tokens, prompt + answer)
        return max(tokens, least)

    def _left(self, accounts: Iterable[BudgetAccount], measure: Measure) -> int | None:
        """Return what is left of the tightest budget; None: there is none."""
        day = day_of(self._clock())
        left = (remaining(a.spending[measure].spent(day), *a.budgets(measure)) for a in accounts)
        return min((one for one in left if one is not None), default=None)

    def _check(self, accounts: Iterable[BudgetAccount], tokens: int | None, cost: int) -> None:
        """Raise QuotaUsedUp where a budget does not have what a request may use.

        `tokens` is None where they are reserved already.
        """
        now = self._clock()
        day = day_of(now)
        refused = None
        for account in accounts:
            if tokens is not None:
                fault = self._refusal(account, "tokens", max(tokens, 1), day, now)
                refused = longer_refusal(refused, fault)
            if cost and account.has_cost_budget:
                fault = self._refusal(account, "cost", cost, day, now)
                refused = longer_refusal(refused, fault)
        if refused is not None:
            raise refused

    def _refusal(
        self, account: BudgetAccount, measure: Measure, amount: int, day: str, now: float
    ) -> QuotaUsedUp | None:
        """Return the refusal of an account; None: its budgets have the amount."""
        budgets = daily, monthly = account.budgets(measure)
        if daily is None and monthly is None:
            return None
        spent = account.spending[measure].spent(day)
        if (daily is None or spent.today + amount <= daily) and (
            monthly is None or spent.month + amount <= monthly
        ):
            return None
        if self._listener is not None:
            for period in exceeded_periods(spent, *budgets, amount):
                self._listener.refused(account, measure, period, day)
        words = Words(measure, self._ledger.currency)
        return refusal(spent, day, now, *budgets, amount, account.subject, words)

    def usage_levels(self) -> Iterator[tuple[str, int, int]]:
        """Yield for day and month how many accounts have used NEARLY of a budget, and all of it.

        Only accounts in use count: keys with requests within FORGET_S, and their owners.
        Reservations do not count, nor do budgets of 0, which are meant to be used up.
        """
        now = self._clock()
        day = day_of(now)
        shares: dict[Period, list[float]] = {"day": [], "month": []}
        for account in chain(self._keys.values(), self._owners.values()):
            if account.known and 0 <= now - account.used_at < FORGET_S:
                for window, share in _used_shares(account, day):
                    shares[window].append(share)
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
        holder: BudgetHolder,
        now: float,
    ) -> BudgetAccount:
        """Return an account with its current budgets; a new one counts unwritten records."""
        account = known.get(name)
        new = account is None
        if account is None:
            self._forget_idle()
            account = known[name] = BudgetAccount(subject, name, holder)
            for batch, ended in self._ledger.unwritten():
                record = ended.record
                if (record.key_id if subject == "key" else record.owner) == name:
                    price = self._ledger.price_of(record.model)
                    account.count(batch, day_of(ended.ended_at), record.usage, price)
        account.used_at = now
        if account.holder is not holder:
            account.apply(holder)
        if new and self._listener is not None:
            # An earlier process may have ended before its listener checked the account.
            self._listener.spent(account, 0, day_of(now))
        return account

    def _on_record(self, batch: int, ended: EndedRequest) -> None:
        record = ended.record
        if record.usage is None:
            return
        if (key := self._keys.get(record.key_id)) is not None:
            self._count(key, batch, ended)
        if record.owner and (owner := self._owners.get(record.owner)) is not None:
            self._count(owner, batch, ended)

    def _count(self, account: BudgetAccount, batch: int, ended: EndedRequest) -> None:
        day, record = day_of(ended.ended_at), ended.record
        account.count(batch, day, record.usage, self._ledger.price_of(record.model))
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
                if not (0 <= now - one.used_at < FORGET_S or one.held or one.reading):
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
            if not account.known:
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
                    for measure in MEASURES:
                        account.spending[measure].read(reading[measure])
                    account.read_at = now
            except Exception as error:  # the reader must not end silently
                if self._failed_at == -math.inf:
                    trace = None if isinstance(error, DatabaseError) else error
                    message = "budgets not read, the last known sums apply: %s"
                    log.warning(message, error, exc_info=trace)
                self._failed_at = self._clock()
            else:
                if self._failed_at != -math.inf:
                    self._failed_at = -math.inf
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
            written = self._ledger.written
            rows = await self._database.fetch(self._sums_query(column, names, day))
            if rows and rows[0].newest is not None:
                written = max(written, batch_of(rows[0].newest))
            for name in names.values():
                found[subject, name] = {one: DatabaseSums({}, written) for one in MEASURES}
            for row in rows:
                sums = found[subject, names[row[0]]]
                sums["tokens"].days[row.of] = int(row.tokens)
                sums["cost"].days[row.of] = int(row.cost_whole) * NANO + int(row.cost_part)
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
                self._ledger.newest_row().label("newest"),
            )
            .where(column.in_(list(names)), table.c.day >= f"{month}-01")
            .group_by(column, "of")
        )


def _has_budget(key: BudgetKey) -> bool:
    budgets = (key.daily_tokens, key.monthly_tokens, key.daily_cost_nano, key.monthly_cost_nano)
    return any(one is not None for one in budgets)


def _used_shares(account: BudgetAccount, day: str) -> Iterator[tuple[Period, float]]:
    """Yield the used share of an account's tighter budget of each period."""
    found: dict[Period, float] = {}
    for measure, spending in account.spending.items():
        daily, monthly = account.budgets(measure)
        spent = spending.spent(day)
        uses: tuple[tuple[Period, int, int | None], ...] = (
            ("day", spent.today, daily), ("month", spent.month, monthly),
        )  # fmt: skip
        for period, used, budget in uses:
            if budget:
                found[period] = max(found.get(period, 0.0), (used - spending.held) / budget)
    yield from found.items()
