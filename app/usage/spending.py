"""The spending of a key or an owner today and this month, each request counted once. Pure.

    spent = the sums of the last database read
          + records of this gateway that were not in them        (`recent`, by batch)
          + reservations of requests in flight                    (`held`)

The same statement returns up to which batch the sums include this gateway's records, so a record
moves from the second line to the first atomically, and is never in both or neither.

Tokens and cost are summed in the same way, and apart: a `Spending` counts one of them.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from app.errors import QuotaUsedUp
from app.money import money_text
from app.usage.records import start_of

BudgetSubject = Literal["key", "owner"]
Period = Literal["day", "month"]
OFTEN: Mapping[Period, str] = {"day": "daily", "month": "monthly"}
# What a budget counts: tokens, or cost in 1/1,000,000,000 of the currency.
Measure = Literal["tokens", "cost"]
# One of the four budgets of an account.
BudgetKind = tuple[Measure, Period]
MEASURES: tuple[Measure, ...] = ("tokens", "cost")


def end_of(period: Period, day: str) -> datetime:
    """Return the end of the period that a UTC day is in."""
    begin = start_of(day)
    if period == "day":
        return begin + timedelta(days=1)
    # 32 days after the first of a month are in the next.
    return (begin.replace(day=1) + timedelta(days=32)).replace(day=1)


@dataclass(frozen=True, slots=True)
class DatabaseSums:
    """Tokens, or cost, by UTC day since the first of a month, of all gateways.

    Past days may be one sum under `2026-11-00`, which is in November and never today. `batch`: the
    last batch of this gateway that is included.
    """

    days: dict[str, int]
    batch: int


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens, or cost, that are spent, or reserved for requests in flight."""

    today: int
    month: int


class Spending:
    """The spending of one key or owner in tokens, or in money, as seen by one gateway."""

    def __init__(self) -> None:
        self.held = 0
        self._reading: DatabaseSums | None = None
        # Batch, day and amount, in order. Amounts are above 0: a day here has a sum.
        self._recent: deque[tuple[int, str, int]] = deque()
        self._recent_days: dict[str, int] = {}

    @property
    def known(self) -> bool:
        """True once the database has been read."""
        return self._reading is not None

    def record(self, batch: int, day: str, amount: int) -> None:
        """Count a record of this gateway that is written with a batch."""
        if not amount:
            return
        if self._recent and self._recent[-1][:2] == (batch, day):
            amount_before = self._recent.pop()[2]
            self._recent.append((batch, day, amount_before + amount))
        else:
            self._recent.append((batch, day, amount))
        self._recent_days[day] = self._recent_days.get(day, 0) + amount

    def read(self, reading: DatabaseSums) -> None:
        """Replace the sums of the previous read."""
        self._reading = reading
        while self._recent and self._recent[0][0] <= reading.batch:
            _, day, amount = self._recent.popleft()
            self._recent_days[day] -= amount
            if not self._recent_days[day]:
                del self._recent_days[day]

    def spent(self, day: str) -> Spent:
        """Return what counts on a day and in its month."""
        today = month = self.held
        for days in (self._recent_days, self._reading.days if self._reading else {}):
            for other, amount in days.items():
                today += amount if other == day else 0
                month += amount if other[:7] == day[:7] else 0
        return Spent(today, month)


def elastic_share(left: int, usual: int, most: int) -> int:
    """Return the reservation of a request without a token limit, as a share of what is left.

    Half of it, so that other requests find tokens too, but not less than requests usually reserve.
    """
    return min(most, left, max(usual, left // 2))


def used_of(
    spent: Spent, daily: int | None, monthly: int | None
) -> Iterator[tuple[Period, int, int]]:
    """Yield the period of each budget that there is, the budget, and what is spent of it."""
    if daily is not None:
        yield "day", daily, spent.today
    if monthly is not None:
        yield "month", monthly, spent.month


def remaining(spent: Spent, daily: int | None, monthly: int | None) -> int | None:
    """Return what is left of the tighter budget; None: there is no budget."""
    return min((budget - used for _, budget, used in used_of(spent, daily, monthly)), default=None)


def refusal(
    spent: Spent,
    day: str,
    now: float,
    daily: int | None,
    monthly: int | None,
    amount: int,
    subject: BudgetSubject = "key",
    words: "Words | None" = None,
) -> QuotaUsedUp | None:
    """Return the refusal of a request that may use an amount, None if it is admitted.

    If both budgets refuse, the refusal with the longer wait. None is no budget. `words`: those of
    an amount; default: tokens.
    """
    words = words or Words()
    if words.measure == "tokens":
        amount = max(amount, 1)  # every request uses tokens, so a used-up budget admits none
    elif amount == 0:
        return None  # a model without a price costs nothing
    refused = None
    for period, budget, used in used_of(spent, daily, monthly):
        fault = _refusal(period, subject, budget, used, day, now, amount, words)
        refused = longer_refusal(refused, fault)
    return refused


def longer_refusal(one: QuotaUsedUp | None, other: QuotaUsedUp | None) -> QuotaUsedUp | None:
    """Return the refusal with the longer wait; None (never) is the longest."""
    if one is None or other is None:
        return one or other
    if one.retry_after_s is None:
        return one
    if other.retry_after_s is None or other.retry_after_s >= one.retry_after_s:
        return other
    return one


def exceeded_periods(
    spent: Spent, daily: int | None, monthly: int | None, amount: int
) -> Iterator[Period]:
    """Yield the periods whose budget refuses a request only because of earlier spending.

    The request is one that `refusal` refuses.
    """
    for period, budget, used in used_of(spent, daily, monthly):
        if amount <= budget < used + amount:
            yield period


@dataclass(frozen=True, slots=True)
class Words:
    """How refusals write amounts: `measure` of what, in which currency (empty: none is set)."""

    measure: Measure = "tokens"
    currency: str = ""

    def amount(self, amount: int) -> str:
        if self.measure == "tokens":
            return f"{amount:,} tokens"
        return money_text(amount, self.currency)

    @property
    def budget(self) -> str:
        return "budget" if self.measure == "tokens" else "cost budget"

    @property
    def takes(self) -> str:
        return "take" if self.measure == "tokens" else "cost"


def _refusal(
    period: Period,
    subject: BudgetSubject,
    budget: int,
    spent: int,
    day: str,
    now: float,
    amount: int,
    words: Words,
) -> QuotaUsedUp | None:
    if spent + amount <= budget:
        return None
    name = OFTEN[period]
    if budget == 0:
        whose = "this key" if subject == "key" else "the owner of this key"
        message = f"the {name} {words.budget} of {whose} is {words.amount(0)}"
        return QuotaUsedUp(message, "budget", None)
    left = max(budget - spent, 0)
    end = end_of(period, day)
    hint = "; a lower max_tokens may let it through" if left else ""
    shared = ", which all keys of this key's owner share," if subject == "owner" else ""
    message = (
        f"the {name} {words.budget} of {words.amount(budget)}{shared} has {words.amount(left)} "
        f"left until {end:%Y-%m-%d} 00:00 UTC, and this request may {words.takes} "
        f"{words.amount(amount)}{hint}"
    )
    if amount > budget:
        return QuotaUsedUp(message, "budget", None)
    return QuotaUsedUp(message, "budget", max(1, -int((now - end.timestamp()) // 1)))
