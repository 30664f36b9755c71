"""What a key has spent today and this month, counted once wherever it lies at the moment. Pure.

    spent = what the database said when it was last read
          + records of this gateway that were not in it then     (`recent`, by batch)
          + what requests under way may still take                (`held`)

The database says in the same statement up to which batch this gateway's records are in it, so a
record moves from the second line to the first at one moment, never to both or neither.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from app.errors import QuotaUsedUp
from app.usage.rows import start_of


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
    """The account of one key at one gateway."""

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
    spent: Spent, day: str, now: float, daily: int | None, monthly: int | None, tokens: int
) -> QuotaUsedUp | None:
    """Return why a request that may take `tokens` is refused, None if it is not.

    Of two budgets that refuse, the one that does so for longer. None is no budget.
    """
    tokens = max(tokens, 1)  # none takes nothing, so what is used up lets none through
    # Never (the budget is too small for the request) stands above any time.
    month = None if monthly is None else _refusal("monthly", monthly, spent.month, day, now, tokens)
    today = None if daily is None else _refusal("daily", daily, spent.today, day, now, tokens)
    if month is None or today is None:
        return month or today
    return today if today.retry_after_s is None else month


def _refusal(
    name: str, budget: int, spent: int, day: str, now: float, tokens: int
) -> QuotaUsedUp | None:
    if spent + tokens <= budget:
        return None
    if budget == 0:
        return QuotaUsedUp(f"the {name} budget of this key is 0 tokens", "budget", None)
    left = max(budget - spent, 0)
    begin = start_of(day)
    # The first of the next month: 32 days after the first are always in it.
    end = begin + timedelta(days=1)
    if name == "monthly":
        end = (begin.replace(day=1) + timedelta(days=32)).replace(day=1)
    hint = "; a lower max_tokens may let it through" if left else ""
    message = (
        f"of the {name} budget of {budget:,} tokens {left:,} are left until {end:%Y-%m-%d} 00:00 "
        f"UTC, and this request may take {tokens:,}{hint}"
    )
    if tokens > budget:
        return QuotaUsedUp(message, "budget", None)
    return QuotaUsedUp(message, "budget", max(1, -int((now - end.timestamp()) // 1)))
