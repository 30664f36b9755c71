"""The number of requests that one engine gets at once. Pure: the caller has clock and engine.

Every request that waits is to wait in the gateway, where keys have their turns, and not in the
engine, where the first come is the first served; but the engine's batch is never to lack one. So
the target grows while requests wait here and none waits there, and falls as soon as the engine has
more than it can run:

    search      From the start the target doubles with each look, until the engine has had enough
                once, or half of its KV cache is used.
    growth      Then it grows by a sixteenth of its value at that time, and not at all where the
                KV cache is nearly full, or where requests were preempted within GROW_AFTER_S.
    waiting     Requests that wait in the engine at two looks in a row, more than a sixteenth of
                the target and more than end in REFILL_S: what waits there is taken off, at most
                half of what the engine has. These few fill a place in the batch at once.
    preemption  The KV cache was too small for those in the batch, and work is lost: the target
                falls to PREEMPTED_RATIO of what the engine had.

After it fell it stays for SETTLE_S: the requests that are too many have to end first. It stays,
too, while the counters do: they are an answer from a cache, or the engine hangs. Additive growth
and multiplicative decrease are what TCP does (RFC 5681), and for the same reasons: several gateways
at one engine come to equal parts, and no bound has to be known.
"""

import math

from app.concurrency.counters import EngineCounters

# A target beyond which no engine runs more; vLLM's own bound (max-num-seqs) is at most 1,024.
MAX_TARGET = 4096
# The first target lies within these, whatever the engine's KV cache holds.
LEAST_FIRST, MOST_FIRST = 8, 64
# Share of the KV cache at which the search ends, and at which the target grows no more.
SEARCH_KV, FULL_KV = 0.5, 0.9
PREEMPTED_RATIO = 0.9
SETTLE_S = 3.0
GROW_AFTER_S = 10.0
# Of the target: the step of growth, and the requests that may wait in the engine.
STEP_RATIO = 16
# Until a place in the batch has a request that waited in the gateway. Short answers leave so many
# places in that time that the batch would lack some.
REFILL_S = 0.1


def initial_target(max_concurrency: float | None) -> int:
    """Return the first target of an engine.

    `max_concurrency` is the number of requests of the greatest length that its KV cache holds;
    most are shorter. None: unknown.
    """
    whole = math.floor(min(max_concurrency or 0.0, MOST_FIRST))
    return max(whole, LEAST_FIRST)


class ConcurrencyTarget:
    """The target of one engine, from 1 to MAX_TARGET."""

    def __init__(self, first: int) -> None:
        self.value = first
        self._step: int | None = None  # None: the search goes on
        self._last: EngineCounters | None = None
        self._looked_at = -math.inf
        self._crowded = 0  # looks in a row with too many waiting in the engine
        self._settled_at = self._grows_at = -math.inf

    def update(self, now: float, counters: EngineCounters, *, queued: bool) -> int:
        """Return the target after a look at the engine's counters; `now` in seconds.

        `queued`: requests wait in the gateway for the model of this engine.
        """
        if counters == self._last:
            return self.value
        last, self._last = self._last or counters, counters
        since_s, self._looked_at = now - self._looked_at, now
        # Fewer of either than before: the engine began anew.
        preempted = counters.preemptions > last.preemptions
        ended = max(counters.ended - last.ended, 0)
        if preempted:
            self._grows_at = now + GROW_AFTER_S
        # Where the target is above what is there, it is this that was too much.
        present = min(self.value, counters.running + counters.waiting)
        slack = max(present // STEP_RATIO, math.ceil(ended * REFILL_S / max(since_s, REFILL_S)), 1)
        self._crowded = self._crowded + 1 if counters.waiting > slack else 0
        if now < self._settled_at:
            self._crowded = 0
        elif preempted:
            # At least half: they may have ended just before the look.
            self._fall(now, max(math.floor(present * PREEMPTED_RATIO), self.value // 2))
        elif self._crowded > 1:
            excess = counters.waiting - slack
            self._fall(now, max(present - excess, present // 2))
        elif queued and not self._crowded and now >= self._grows_at:
            self._grow(counters.kv_usage)
        return self.value

    def _fall(self, now: float, value: int) -> None:
        self.value = max(value, 1)
        self._step = max(self.value // STEP_RATIO, 1)
        self._crowded = 0
        self._settled_at = now + SETTLE_S

    def _grow(self, kv_usage: float) -> None:
        if self._step is None and kv_usage >= SEARCH_KV:
            self._step = max(self.value // STEP_RATIO, 1)
        if kv_usage < FULL_KV:
            self.value = min(self.value + (self._step or self.value), MAX_TARGET)
