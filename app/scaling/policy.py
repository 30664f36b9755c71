"""The number of engines that a model needs. Pure: the caller has the clock and the engines.

An engine takes `slots` requests at once, and the others wait in the gateway's queue. `demand` is
the number of engines at which none would wait: requests in flight and waiting, divided by `slots`.
Servers that the gateway does not run take their part of it, where they were READY then.

    up      The queue would take longer than `target_wait_s`, and demand was above the present
            number for all of the last UP_S: a burst that the engines work off is none. As many
            as the requests that arrive need and as work off the queue within CLEAR_S, at most
            twice as many as before, and the next time when these are READY: until then the queue
            grows whatever is decided, and would ask for more and more.
    down    By one, where demand was below DOWN_RATIO of the engines that remain for all of the
            last DOWN_S, or as long as DOWN_STARTS starts take: an engine that is needed again
            soon is not worth its end. Also while engines start: one may wait for room for ever.

Between a step up and the next step down lies that whole time, since the demand that asked for the
engine is among what a step down looks back on. Knative's autoscaler has the same shape, a short
window for up and a long one for down; its windows are means, which follow a single burst.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

# Time for which demand has to be above the engines before one is started, in seconds.
UP_S = 10.0
# Least time for which demand has to be low before an engine is stopped, in seconds.
DOWN_S = 300.0
DOWN_STARTS = 3.0
# Share of the engines that remain which demand may take when one is stopped.
DOWN_RATIO = 0.8
# Time over which the requests that arrive and end are counted, in seconds.
RATE_S = 60.0
# Time within which new engines work off the queue, in seconds.
CLEAR_S = 120.0


@dataclass(frozen=True, slots=True)
class ScalingTerms:
    """The bounds within which a model's engines are scaled."""

    least: int
    most: int
    slots: int  # requests at one engine at once
    target_wait_s: float  # in the queue


@dataclass(frozen=True, slots=True)
class Load:
    """What a model has to do at one moment, and what it has for it."""

    in_flight: int  # requests at engines
    waiting: int  # requests in the queue
    ended: int  # requests that have ended since the gateway began
    engines: int  # engines that run or start
    ready: int  # of these, those that take requests
    # Servers that the gateway does not run, as a number of engines: this gateway's part of their
    # slots. One that is down is none, it may stay so.
    servers: float = 0.0
    start_s: float | None = None  # the time that a start takes; None: unknown

    @property
    def arrived(self) -> int:
        """Requests that have arrived since the gateway began."""
        return self.ended + self.in_flight + self.waiting

    @property
    def working(self) -> float:
        """Engines that work now."""
        return self.ready + self.servers


class _Moment(NamedTuple):
    now: float
    load: Load


class ScalingPolicy:
    """Decides for one model. `decide` is called again and again, at any intervals."""

    def __init__(self, terms: ScalingTerms) -> None:
        # May be replaced at any time: what is remembered does not depend on them.
        self.terms = terms
        # As far back as a step down looks.
        self._past: deque[_Moment] = deque()

    def decide(self, now: float, load: Load) -> int:
        """Return the number of engines that the model should have; `now` in seconds."""
        terms = self.terms
        down_s = max(DOWN_S, DOWN_STARTS * (load.start_s or 0.0))
        self._past.append(_Moment(now, load))
        # The newest one that is too old stays: it tells of the time up to the next.
        while len(self._past) > 1 and self._past[1].now <= now - down_s:
            self._past.popleft()
        wanted = load.engines
        sustained = min(self._demands(UP_S, 1.0), default=0.0)
        peak = max(self._demands(down_s, DOWN_RATIO), default=inf)
        if (
            load.ready == load.engines
            and sustained > load.engines
            and self._wait_s(load) > terms.target_wait_s
        ):
            wanted = self._step_up(load, sustained)
        elif peak <= DOWN_RATIO * (load.engines - 1):
            wanted = load.engines - 1
        return min(max(wanted, terms.least), terms.most)

    def _step_up(self, load: Load, sustained: float) -> int:
        most = min(ceil(sustained), 2 * load.engines)
        return max(min(self._needed(load), most), load.engines + 1)

    def _demands(self, seconds: float, share: float) -> list[float]:
        """Return each demand of the last seconds; none if not so much is known.

        Without what the servers took that were READY then, up to a share of their slots.
        """
        newest = self._past[-1].now
        if self._past[0].now > newest - seconds:
            return []
        return [
            (load.in_flight + load.waiting) / self.terms.slots - share * load.servers
            for load in self._since(newest - seconds)
        ]

    def _since(self, moment: float) -> list[Load]:
        """Return the loads since a moment, and the one that it found."""
        found: list[Load] = []
        for past in reversed(self._past):
            found.append(past.load)
            if past.now <= moment:
                break
        return found[::-1]

    def _rates(self) -> tuple[float, float]:
        """Return how many requests end at one engine, and how many arrive, per second."""
        past = [one for one in self._past if one.now > self._past[-1].now - RATE_S]
        seconds = past[-1].now - past[0].now
        engine_s = sum(
            (after.now - before.now) * before.load.working for before, after in pairwise(past)
        )
        if not engine_s:
            return 0.0, 0.0
        first, last = past[0].load, past[-1].load
        return (last.ended - first.ended) / engine_s, (last.arrived - first.arrived) / seconds

    def _wait_s(self, load: Load) -> float:
        """Return how long a request that comes now would wait for the engines of now."""
        if not load.waiting:
            return 0.0
        ending, _ = self._rates()
        # Nothing has ended: an answer may take longer than RATE_S.
        return load.waiting / (ending * (load.working or 1.0)) if ending else inf

    def _needed(self, load: Load) -> int:
        """Return the engines for the requests that arrive, and for the queue within CLEAR_S."""
        ending, arriving = self._rates()
        if not ending:
            return load.engines
        return ceil((arriving + load.waiting / CLEAR_S) / ending - load.servers)
