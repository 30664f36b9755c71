"""Budgets of keys and owners per UTC day and month, across all gateways of a database.

A budget is in tokens, where prompt tokens, cached or not, and completion tokens count, or in money,
by the prices of the models. A request reserves the most that it can use, at the highest price of a
prompt token, cached or not; its real usage replaces that at the end.

A request of a key whose owner has a budget too is reserved in both accounts or in neither, and so
is a request in budgets of both kinds: between the first check and the last reservation nothing is
awaited.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from app.database import Database
from app.errors import QuotaUsedUp, ServiceUnavailable
from app.telemetry import Tokens
from app.usage.accounts import FORGET_S, BudgetAccount, BudgetAccounts, BudgetKey, SpendingListener
from app.usage.ledger import Ledger
from app.usage.records import MILLION, Price, day_of, tokens_of
from app.usage.spending import (
    Measure,
    Period,
    Words,
    elastic_share,
    exceeded_periods,
    longer_refusal,
    refusal,
    remaining,
    used_of,
)

# Share at which a budget is nearly used up.
NEARLY = 0.9


class BudgetReservation(msgspec.Struct, eq=False):
    """What is reserved for a request in each of its accounts, until it is closed.

    The ledger counts a request from its record on. So close it and add the record in the same turn
    of the event loop, in any order: then the request is counted exactly once.
    """

    accounts: Sequence[BudgetAccount]
    price_of: Callable[[str], Price | None] | None  # None: no account has a budget in money
    tokens: int = 0
    cost: int = 0
    closed: bool = False

    def hold(self, tokens: int, cost: int) -> None:
        """Replace what is reserved."""
        if not self.closed:
            for account in self.accounts:
                account.spending["tokens"].held += tokens - self.tokens
                if cost != self.cost:
                    account.spending["cost"].held += cost - self.cost
            self.tokens, self.cost = tokens, cost

    def settle(self, usage: Tokens, model: str) -> None:
        """Replace what is reserved by what a model was used for."""
        price = None if self.price_of is None else self.price_of(model)
        self.hold(tokens_of(usage), 0 if price is None else price.cost(usage))

    def close(self) -> None:
        """Give back what is reserved."""
        self.hold(0, 0)
        self.closed = True


class Budgets:
    """Reserves tokens and money of keys and owners that have a budget."""

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        clock: Callable[[], float] = time.time,
        listener: SpendingListener | None = None,
    ) -> None:
        self.accounts = BudgetAccounts(database, ledger, clock, listener)
        self._ledger = ledger
        self._clock = clock
        self._listener = listener

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
        """Reserve in the budgets of a key and its owner; close the returned reservation.

        `prompt` of the tokens are the prompt's, at the prices of `model`. `output` is the longest
        answer, where that is more than the rest: money is reserved for both. `elastic` is for a
        request without a token limit: the least and the most tokens that it can use. It reserves a
        share of what is left, or `tokens` if that is less (`elastic_share`). Raises QuotaUsedUp,
        whose retry_after_s are whole seconds to the next UTC day or month (None if the budget
        itself is too small), and ServiceUnavailable if the key's spending could not be read.
        """
        accounts = await self.accounts.use(key, self._clock())
        # From here on nothing is awaited: every account reserves, or none does.
        if not all(one.known for one in accounts):
            raise ServiceUnavailable("what this key has spent cannot be read now; try again")
        price_of = self._ledger.price_of if any(a.has_cost_budget for a in accounts) else None
        price = None if price_of is None else price_of(model)
        if elastic is not None:
            tokens = self._elastic_tokens(accounts, tokens, prompt, price, *elastic)
            output = 0  # it is bounded to the rest
        cost = 0 if price is None else price.most(prompt, max(tokens - prompt, output))
        self._check(accounts, tokens, cost)
        reservation = BudgetReservation(accounts, price_of)
        reservation.hold(tokens, cost)
        return reservation

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
        budgets = account.budgets(measure)
        if budgets == (None, None):
            return None
        spent = account.spending[measure].spent(day)
        words = Words(measure, self._ledger.currency)
        refused = refusal(spent, day, now, *budgets, amount, account.subject, words)
        if refused is not None and self._listener is not None:
            for period in exceeded_periods(spent, *budgets, amount):
                self._listener.note(account, 0, day, [(measure, period)])
        return refused

    def usage_levels(self) -> Iterator[tuple[str, int, int]]:
        """Yield for day and month how many accounts have used NEARLY of a budget, and all of it.

        Only accounts in use count: keys with requests within FORGET_S, and their owners.
        Reservations do not count, nor do budgets of 0, which are meant to be used up.
        """
        now = self._clock()
        day = day_of(now)
        shares: dict[Period, list[float]] = {"day": [], "month": []}
        for account in self.accounts:
            if account.known and 0 <= now - account.used_at < FORGET_S:
                for window, share in _used_shares(account, day):
                    shares[window].append(share)
        for window, used in shares.items():
            yield window, sum(one >= NEARLY for one in used), sum(one >= 1 for one in used)

    async def close(self) -> None:
        await self.accounts.close()


def _used_shares(account: BudgetAccount, day: str) -> Iterator[tuple[Period, float]]:
    """Yield the used share of an account's tighter budget of each period."""
    found: dict[Period, float] = {}
    for measure, spending in account.spending.items():
        for period, budget, used in used_of(spending.spent(day), *account.budgets(measure)):
            if budget:
                found[period] = max(found.get(period, 0.0), (used - spending.held) / budget)
    yield from found.items()
