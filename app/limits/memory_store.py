"""Limits counted in this process. Everything happens on one loop, so a decision is one step."""

from app.limits import bucket
from app.limits.terms import Reading, Terms

# A request has six buckets at most, and may add each of them twice: as it begins, and as it ends if
# it was forgotten meanwhile. More are looked at than are added, so the full ones get ever fewer.
DECISIONS_PER_LOOK = 16
LOOKED_AT = 2 * 12 * DECISIONS_PER_LOOK


class MemoryStore:
    """Buckets that are not full and slots that are taken; what is back to normal is forgotten."""

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._full_at: dict[str, float] = {}
        self._busy: dict[str, int] = {}
        self._decisions = 0  # since the last look
        self._not_looked_at: list[str] = []  # in this round of all buckets

    def __len__(self) -> int:
        return len(self._full_at) + len(self._busy)

    def decide(self, terms: Terms, now: float) -> Reading:
        """Take all that a request asks for, or nothing. `now` is in seconds of a steady clock."""
        burst_s, full_at, taken, scope = self._burst_s, self._full_at, self._busy, terms.scope
        debts: list[float] = []
        charged: dict[str, float] = {}  # written when everything has passed, like `held`
        for place, cost_s in terms.costs.items():
            debt_s = full_at.get(place, now) - now
            if debt_s < 0.0:
                debt_s = 0.0
            owed_s = debt_s + cost_s
            if cost_s:
                # Nothing waits whose debt and cost fit into the burst.
                if owed_s > burst_s and bucket.wait(debt_s, cost_s, burst_s):
                    return self._refuse(terms, now)
                charged[place] = now + owed_s
            debts.append(owed_s)
        busy: list[int] = []
        held: dict[str, int] = {}
        for slot in scope.slots:
            count = taken.get(slot.place, 0) + 1
            if count > slot.limit:
                return self._refuse(terms, now)
            held[slot.place] = count
            busy.append(count)
        full_at.update(charged)
        taken.update(held)
        self._decisions += 1
        if self._decisions >= DECISIONS_PER_LOOK:
            self._forget(now)
        return Reading(True, debts, busy)

    def release(self, terms: Terms, tokens: float, now: float) -> None:
        """Give the slots of a decision back, and charge `tokens` instead of those reserved."""
        full_at, taken, scope = self._full_at, self._busy, terms.scope
        for slot in scope.slots:
            left = taken[slot.place] - 1
            if left:
                taken[slot.place] = left
            else:
                del taken[slot.place]
        for place, limit, _ in scope.metered:
            if limit:
                due_s = tokens * 60.0 / limit - terms.costs[place]
                if due_s:
                    full_at[place] = bucket.charge(full_at.get(place, now), now, due_s)

    def _refuse(self, terms: Terms, now: float) -> Reading:
        debts = [bucket.debt(self._full_at.get(place, now), now) for place in terms.costs]
        return Reading(False, debts, [self._busy.get(slot.place, 0) for slot in terms.slots])

    def _forget(self, now: float) -> None:
        """Look at the next buckets in a round of all, and drop the full ones."""
        self._decisions = 0
        full_at = self._full_at
        if not self._not_looked_at:
            self._not_looked_at = list(full_at)
        for place in self._not_looked_at[-LOOKED_AT:]:
            if full_at[place] <= now:
                del full_at[place]
        del self._not_looked_at[-LOOKED_AT:]
