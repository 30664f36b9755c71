"""Simulates a model whose engines are scaled: requests that arrive, wait, and are served.

Time is simulated in steps. An engine serves a fixed number of requests at once, each for a time of
its own, and takes a while to start; it drains before it stops.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from app.scaling import Load

STEP_S = 1.0
DECIDE_S = 5.0

# Requests per second at a moment.
Rate = Callable[[float], float]
Decide = Callable[[float, Load], int]


@dataclass
class Engine:
    """One engine: the moment at which it is READY, and the ends of its requests, a heap."""

    ready_at: float
    ends: list[float] = field(default_factory=list)
    draining: bool = False


@dataclass
class Outcome:
    """What came of a run."""

    waits: list[float]
    engine_s: float
    # The moment and the number of engines after each change.
    changes: list[tuple[float, int]]

    def late(self, target_s: float) -> float:
        """Return the share of requests that waited longer than a target."""
        return sum(wait > target_s for wait in self.waits) / max(len(self.waits), 1)


@dataclass
class Fleet:
    """The engines of a model, its queue, and what has happened."""

    slots: int
    start_s: float
    service_s: tuple[float, float]
    dice: random.Random
    engines: list[Engine] = field(default_factory=list)
    queue: deque[float] = field(default_factory=deque)
    waits: list[float] = field(default_factory=list)
    ended: int = 0

    def load(self, now: float) -> Load:
        """Return what a gateway would measure."""
        staying = [one for one in self.engines if not one.draining]
        return Load(
            in_flight=sum(len(one.ends) for one in self.engines),
            waiting=len(self.queue),
            ended=self.ended,
            engines=len(staying),
            ready=sum(one.ready_at <= now for one in staying),
            start_s=self.start_s,
        )

    def step(self, now: float, arrivals: int) -> None:
        """End what has ended, and serve what waits."""
        for one in self.engines:
            while one.ends and one.ends[0] <= now:
                heappop(one.ends)
                self.ended += 1
        self.engines = [one for one in self.engines if one.ends or not one.draining]
        self.queue.extend([now] * arrivals)
        if not self.queue:
            return
        for one in sorted(self.engines, key=lambda engine: len(engine.ends)):
            while (
                self.queue
                and len(one.ends) < self.slots
                and one.ready_at <= now
                and not one.draining
            ):
                self.waits.append(now - self.queue.popleft())
                heappush(one.ends, now + self.dice.uniform(*self.service_s))

    def scale(self, now: float, wanted: int) -> None:
        """Start engines, or drain the newest ones."""
        staying = [one for one in self.engines if not one.draining]
        self.engines += [Engine(now + self.start_s) for _ in range(wanted - len(staying))]
        for one in staying[wanted:]:
            one.draining = True


def simulate(
    decide: Decide,
    rate: Rate,
    seconds: float,
    *,
    first: int,
    slots: int = 8,
    start_s: float = 60.0,
    service_s: tuple[float, float] = (5.0, 25.0),
    seed: int = 1,
) -> Outcome:
    """Run a trace from the beginning with `first` engines that are READY."""
    dice = random.Random(seed)
    fleet = Fleet(slots, start_s, service_s, dice, [Engine(0.0) for _ in range(first)])
    outcome = Outcome(fleet.waits, 0.0, [(0.0, first)])
    now = decide_at = 0.0
    while now < seconds:
        fleet.step(now, _arrivals(dice, rate(now) * STEP_S))
        if now >= decide_at:
            decide_at = now + DECIDE_S
            before = fleet.load(now).engines
            wanted = decide(now, fleet.load(now))
            if wanted != before:
                fleet.scale(now, wanted)
                outcome.changes.append((now, wanted))
        outcome.engine_s += len(fleet.engines) * STEP_S
        now += STEP_S
    return outcome


def fixed(number: int) -> Decide:
    """Return a decision for a fleet that never changes."""
    return lambda now, load: number


def _arrivals(dice: random.Random, mean: float) -> int:
    """Return the number of arrivals of a Poisson process, for small means."""
    count, left = 0, dice.expovariate(1.0)
    while left < mean:
        count += 1
        left += dice.expovariate(1.0)
    return count
