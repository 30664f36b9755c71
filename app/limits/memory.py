"""Limits counted in this process. Everything happens on one loop, so a decision is one step.

What is here runs for each request, so its loops are plain ones.
"""

from collections import OrderedDict
from itertools import islice

from app.limits import bucket
from app.limits.terms import Reading, Terms

# One charge adds one bucket at most. As more are looked at than may have come, the full ones among
# many become ever fewer.
CHARGES_PER_LOOK = 32
LOOKED_AT = 3 * CHARGES_PER_LOOK


class MemoryStore:
    """Buckets that are not full and slots that are taken; what is back to normal is forgotten."""

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._full_at: OrderedDict[str, float] = OrderedDict()
        self._busy: dict[str, int] = {}
        self._charges = 0

    def __len__(self) -> int:
        return len(self._full_at) + len(self._busy)

    def decide(self, terms: Terms, now: float) -> Reading:
        """Take all that a request asks for, or nothing. `now` is in seconds of a steady clock."""
        admitted = True
        costs = terms.costs
        busy: list[int] = []
        debts: list[float] = []
        for slot in terms.slots:
            count = self._busy.get(slot.place, 0)
            if count >= slot.limit:
                admitted = False
            busy.append(count)
        for i, term in enumerate(terms.buckets):
            debt_s = bucket.debt(self._full_at.get(term.place, now), now)
            if bucket.wait(debt_s, costs[i], self._burst_s):
                admitted = False
            debts.append(debt_s)
        if not admitted:
            return Reading(False, debts, busy)
        for i, slot in enumerate(terms.slots):
            busy[i] += 1
            self._busy[slot.place] = busy[i]
        for i, term in enumerate(terms.buckets):
            if costs[i]:
                debts[i] += costs[i]
                self._full_at[term.place] = bucket.owing(debts[i], now)
        self._forget(len(debts), now)
        return Reading(True, debts, busy)

    def release(self, terms: Terms, costs: list[float], now: float) -> None:
        """Give the slots of a decision back and charge its buckets what is still due."""
        for slot in terms.slots:
            left = self._busy[slot.place] - 1
            if left:
                self._busy[slot.place] = left
            else:
                del self._busy[slot.place]
        for i, term in enumerate(terms.buckets):
            if costs[i]:
                full_at = self._full_at.get(term.place, now)
                self._full_at[term.place] = bucket.charge(full_at, now, costs[i])
        self._forget(len(costs), now)

    def _forget(self, charges: int, now: float) -> None:
        """Look once in a while at the buckets that were not looked at for longest."""
        self._charges += charges
        if self._charges < CHARGES_PER_LOOK:
            return
        self._charges = 0
        for oldest in list(islice(self._full_at, LOOKED_AT)):
            if self._full_at[oldest] <= now:
                del self._full_at[oldest]
            else:
                self._full_at.move_to_end(oldest)
