"""Limits counted in this process, on one event loop: a decision is atomic."""

from app.limits import bucket
from app.limits.terms import Reading, Terms

# A request has at most six buckets, and may add each of them twice: at its begin, and at its end if
# it was evicted meanwhile. More are checked than are added, so the number of full ones shrinks.
DECISIONS_PER_EVICTION = 16
EVICTION_BATCH = 2 * 12 * DECISIONS_PER_EVICTION


class MemoryStore:
    """Stores buckets that are not full and slots in use; evicts full buckets and free slots."""

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._full_at: dict[str, float] = {}
        self._busy: dict[str, int] = {}
        self._decisions = 0  # since the last eviction
        self._unchecked: list[str] = []  # buckets still to be checked in this round

    def __len__(self) -> int:
        return len(self._full_at) + len(self._busy)

    def decide(self, terms: Terms, now: float) -> Reading:
        """Admit a request and charge all its limits, or none. `now`: monotonic seconds."""
        burst_s, full_at, taken = self._burst_s, self._full_at, self._busy
        debts: list[float] = []
        charged: dict[str, float] = {}  # stored once every limit has passed, like `held`
        for place, cost_s in terms.costs.items():
            debt_s = full_at.get(place, now) - now
            owed_s = debt_s + cost_s if debt_s > 0.0 else cost_s
            # A debt and cost that fit into the burst need not wait.
            if owed_s > burst_s and bucket.wait(debt_s, cost_s, burst_s):
                return self._refuse(terms, now)
            if cost_s:
                charged[place] = now + owed_s
            debts.append(owed_s)
        held: dict[str, int] = {}
        for slot in terms.scope.slots:
            held[slot.place] = count = taken.get(slot.place, 0) + 1
            if count > slot.limit:
                return self._refuse(terms, now)
        full_at.update(charged)
        taken.update(held)
        self._decisions += 1
        if self._decisions >= DECISIONS_PER_EVICTION:
            self._evict(now)
        return Reading(True, debts, [*held.values()])

    def release(self, terms: Terms, tokens: float, now: float) -> None:
        """Release the slots of a decision, and charge `tokens` instead of the reserved ones."""
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
        return Reading(False, debts, [self._busy.get(slot.place, 0) for slot in terms.scope.slots])

    def _evict(self, now: float) -> None:
        """Check the next buckets in a round over all, and drop the full ones."""
        self._decisions = 0
        full_at = self._full_at
        if not self._unchecked:
            self._unchecked = list(full_at)
        for place in self._unchecked[-EVICTION_BATCH:]:
            if full_at[place] <= now:
                del full_at[place]
        del self._unchecked[-EVICTION_BATCH:]
