"""What a key or an owner has spent today and this month, each token counted once. Pure.

    spent = what the database said when it was last read
          + records of this gateway that were not in it then     (`recent`, by batch)
          + what requests under way may still take                (`held`)

The database says in the same statement up to which batch this gateway's records are in it, so a
record moves from the second line to the first at one moment, never to both or neither.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from app.errors import QuotaUsedUp
from app.usage.records import start_of

Subject = Literal["key", "owner"]
Period = Literal["day", "month"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What the database said: tokens by UTC day from the first of a month on, of all gateways.

    Days that are over may be one sum under `2026-11-00`, which is a day of November and never
    today. `batch`: this gateway's batches up to this one are among them, and no later one.
    """

    days: Mapping[str, int]
    batch: int


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens that are spent, or held for requests under way."""

    today: int
    month: int


class Spending:
    """The account of one key or owner at one gateway."""

    def __init__(self) -> None:
        self.held = 0
        self._reading: Reading | None = None
        # Batch, day, tokens, in order. Tokens are above 0: a day is in the sums while it is here.
        self._recent: deque[tuple[int, str, int]] = deque()
        self._recent_days: dict[str, int] = {}

    @property
    def known(self) -> bool:
        """Whether the database was ever read."""
        return self._reading is not None

    def record(self, batch: int, day: str, tokens: int) -> None:
        """Count a record of this gateway that goes to the database with a batch."""
        if not tokens:
            return
        if self._recent and self._recent[-1][:2] == (batch, day):
            tokens_before = self._recent.pop()[2]
            self._recent.append((batch, day, tokens_before + tokens))
        else:
            self._recent.append((batch, day, tokens))
        self._recent_days[day] = self._recent_days.get(day, 0) + tokens

    def read(self, reading: Reading) -> None:
        """Take what the database said, in place of what it said before."""
        self._reading = reading
        while self._recent and self._recent[0][0] <= reading.batch:
            _, day, tokens = self._recent.popleft()
            self._recent_days[day] -= tokens
            if not self._recent_days[day]:
                del self._recent_days[day]

    def spent(self, day: str) -> Spent:
        """Return what counts on a day."""
        today = month = self.held
        for days in (self._recent_days, self._reading.days if self._reading else {}):
            for other, tokens in days.items():
                today += tokens if other == day else 0
                month += tokens if other[:7] == day[:7] else 0
        return Spent(today, month)


def share_of(left: int, usual: int, most: int) -> int:
    """Return how much of what is left one request may hold that does not say what it takes.

    Half of it, so that others find something too, but not less than requests usually hold.
    """
    return min(most, left, max(usual, left // 2))


def left_of(spent: Spent, daily: int | None, monthly: int | None) -> int:
    """Return how many tokens the tighter of two budgets has left; one of them must be there."""
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
    subject: Subject = "key",
) -> QuotaUsedUp | None:
    """Return why a request that may take `tokens` is refused, None if it is not.

    Of two budgets that refuse, the one that does so for longer. None is no budget.
    """
    tokens = max(tokens, 1)  # none takes nothing, so what is used up lets none through
    month = today = None
    if monthly is not None:
        month = _refusal("monthly", subject, monthly, spent.month, day, now, tokens)
    if daily is not None:
        today = _refusal("daily", subject, daily, spent.today, day, now, tokens)
    return longer(today, month)


def longer(one: QuotaUsedUp | None, other: QuotaUsedUp | None) -> QuotaUsedUp | None:
    """Return the refusal that holds for longer; never (None) stands above any time."""
    if one is None or other is None:
        return one or other
    if one.retry_after_s is None:
        return one
    if other.retry_after_s is None or other.retry_after_s >= one.retry_after_s:
        return other
    return one


def too_full(spent: Spent, daily: int | None, monthly: int | None, tokens: int) -> Iterator[Period]:
    """Return the periods whose budget would let a request through if less of it were spent."""
    tokens = max(tokens, 1)
    if daily is not None and tokens <= daily < spent.today + tokens:
        yield "day"
    if monthly is not None and tokens <= monthly < spent.month + tokens:
        yield "month"


def _refusal(
    name: str, subject: Subject, budget: int, spent: int, day: str, now: float, tokens: int
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
