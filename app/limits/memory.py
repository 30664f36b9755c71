"""Limits counted in this process. Everything happens on one loop, so a decision is one step."""

from collections import OrderedDict

from app.limits import bucket
from app.limits.terms import Reading, Terms


class MemoryStore:
    """Buckets that are not full and slots that are taken; what is back to normal is forgotten."""

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._full_at: OrderedDict[str, float] = OrderedDict()
        self._busy: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._full_at) + len(self._busy)

    def decide(self, terms: Terms, now: float) -> Reading:
        """Take all that a request asks for, or nothing. `now` is in seconds of a steady clock."""
        debts = [bucket.debt(self._full_at.get(term.place, now), now) for term in terms.buckets]
        busy = [self._busy.get(term.place, 0) for term in terms.slots]
        if any(count >= term.limit for term, count in zip(terms.slots, busy, strict=True)) or any(
            bucket.wait(debt, term.cost_s, self._burst_s)
            for term, debt in zip(terms.buckets, debts, strict=True)
        ):
            return Reading(False, debts, busy)
        for slot in terms.slots:
            self._busy[slot.place] = self._busy.get(slot.place, 0) + 1
        costs = [term.cost_s for term in terms.buckets]
        self._charge(terms, costs, now)
        owed = [debt + cost_s for debt, cost_s in zip(debts, costs, strict=True)]
        return Reading(True, owed, [count + 1 for count in busy])

    def release(self, terms: Terms, costs: list[float], now: float) -> None:
        """Give the slots of a decision back and charge its buckets what is still due."""
        for slot in terms.slots:
            left = self._busy[slot.place] - 1
            if left:
                self._busy[slot.place] = left
            else:
                del self._busy[slot.place]
        self._charge(terms, costs, now)

    def _charge(self, terms: Terms, costs: list[float], now: float) -> None:
        """Charge, or refund, each bucket."""
        for term, cost_s in zip(terms.buckets, costs, strict=True):
            if cost_s:
                full_at = self._full_at.get(term.place, now)
                self._full_at[term.place] = bucket.charge(full_at, now, cost_s)
                self._forget(now)

    def _forget(self, now: float) -> None:
        """Look at the two buckets that were not looked at for longest.

        One charge adds one bucket at most, so the full ones among many become ever fewer.
        """
        for _ in range(2):
            if not self._full_at:
                return
            oldest = next(iter(self._full_at))
            if self._full_at[oldest] <= now:
                del self._full_at[oldest]
            else:
                self._full_at.move_to_end(oldest)
