"""The spending of a key or an owner today and this month, each token counted once. Pure.

    spent = the sums of the last database read
          + records of this gateway that were not in them        (`recent`, by batch)
          + reservations of requests in flight                    (`held`)

The same statement returns up to which batch the sums include this gateway's records, so a record
moves from the second line to the first atomically, and is never in both or neither.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from app.errors import QuotaUsedUp
from app.usage.records import start_of

BudgetSubject = Literal["key", "owner"]
Period = Literal["day", "month"]


@dataclass(frozen=True, slots=True)
class DatabaseSums:
    """Tokens by UTC day since the first of a month, of all gateways.

    Past days may be one sum under `2026-11-00`, which is in November and never today. `batch`: the
    last batch of this gateway that is included.
    """

    days: Mapping[str, int]
    batch: int


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens that are spent, or reserved for requests in flight."""

    today: int
    month: int


class Spending:
    """The spending of one key or owner, as seen by one gateway."""

    def __init__(self) -> None:
        self.held = 0
        self._reading: DatabaseSums | None = None
        # Batch, day and tokens, in order. Tokens are above 0: a day here has a sum.
        self._recent: deque[tuple[int, str, int]] = deque()
        self._recent_days: dict[str, int] = {}

    @property
    def known(self) -> bool:
        """True once the database has been read."""
        return self._reading is not None

    def record(self, batch: int, day: str, tokens: int) -> None:
        """Count a record of this gateway that is written with a batch."""
        if not tokens:
            return
        if self._recent and self._recent[-1][:2] == (batch, day):
            tokens_before = self._recent.pop()[2]
            self._recent.append((batch, day, tokens_before + tokens))
        else:
            self._recent.append((batch, day, tokens))
        self._recent_days[day] = self._recent_days.get(day, 0) + tokens

    def read(self, reading: DatabaseSums) -> None:
        """Replace the sums of the previous read."""
        self._reading = reading
        while self._recent and self._recent[0][0] <= reading.batch:
            _, day, tokens = self._recent.popleft()
            self._recent_days[day] -= tokens
            if not self._recent_days[day]:
                del self._recent_days[day]

    def spent(self, day: str) -> Spent:
        """Return the tokens that count on a day and in its month."""
        today = month = self.held
        for days in (self._recent_days, self._reading.days if self._reading else {}):
            for other, tokens in days.items():
                today += tokens if other == day else 0
                month += tokens if other[:7] == day[:7] else 0
        return Spent(today, month)


def elastic_share(left: int, usual: int, most: int) -> int:
    """Return the reservation of a request without a token limit, as a share of what is left.

    Half of it, so that other requests find tokens too, but not less than requests usually reserve.
    """
    return min(most, left, max(usual, left // 2))


def remaining_tokens(spent: Spent, daily: int | None, monthly: int | None) -> int:
    """Return the remaining tokens of the tighter budget; at least one must be set."""
    return min(
        budget - used
        for budget, used in ((daily, spent.today), (monthly, spent.month))
        if budget is not None
    )


def refusal(
    spent: Spent,
    day: str,
    now: float,
    daily: int | None,
    monthly: int | None,
    tokens: int,
    subject: BudgetSubject = "key",
) -> QuotaUsedUp | None:
    """Return the refusal of a request that may use `tokens`, None if it is admitted.

    If both budgets refuse, the refusal with the longer wait. None is no budget.
    """
    tokens = max(tokens, 1)  # every request uses tokens, so a used-up budget admits none
    month = today = None
    if monthly is not None:
        month = _refusal("monthly", subject, monthly, spent.month, day, now, tokens)
    if daily is not None:
        today = _refusal("daily", subject, daily, spent.today, day, now, tokens)
    return longer_refusal(today, month)


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
    spent: Spent, daily: int | None, monthly: int | None, tokens: int
) -> Iterator[Period]:
    """Yield the periods whose budget refuses a request only because of earlier spending."""
    tokens = max(tokens, 1)
    if daily is not None and tokens <= daily < spent.today + tokens:
        yield "day"
    if monthly is not None and tokens <= monthly < spent.month + tokens:
        yield "month"


def _refusal(
    name: str, subject: BudgetSubject, budget: int, spent: int, day: str, now: float, tokens: int
) -> QuotaUsedUp | None:
    if spent + tokens <= budget:
        return None
    if budget == 0:
        whose = "this key" if subject == "key" else "the owner of this key"
        return QuotaUsedUp(f"the {name} budget of {whose} is 0 tokens", "budget", None)
    left = max(budget - spent, 0)
    begin = start_of(day)
    # The first of the next month: 32 days after the first are always in it.
    end = begin + timedelta(days=1)
    if name == "monthly":
        end = (begin.replace(day=1) + timedelta(days=32)).replace(day=1)
    hint = "; a lower max_tokens may let it through" if left else ""
    shared = ", which all keys of this key's owner share," if subject == "owner" else ""
    message = (
        f"of the {name} budget of {budget:,} tokens{shared} {left:,} are left until "
        f"{end:%Y-%m-%d} 00:00 UTC, and this request may take {tokens:,}{hint}"
    )
    if tokens > budget:
        return QuotaUsedUp(message, "budget", None)
    return QuotaUsedUp(message, "budget", max(1, -int((now - end.timestamp()) // 1)))
