"""The last hour of the gateway: one reading of the counters every ten seconds, and rates from them.

A reading copies a few sums, so that it costs the same however many requests there were. Rates and
percentiles are made from the differences of readings when a page asks for them.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from app.telemetry.metrics import Metrics, Totals, read_totals

log = logging.getLogger(__name__)

INTERVAL_S = 10.0
SPAN_S = 3600.0
# Percentiles of fewer requests than come in ten seconds would jump.
TTFT_SPAN_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """The requests in flight at one moment, and the tokens of their answers so far."""

    in_flight: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at one moment."""

    at: float  # seconds of a monotonic clock
    totals: Totals
    load: Load


@dataclass(frozen=True, slots=True)
class Sample:
    """What happened between two readings. Seconds; None: no request began to answer."""

    at: float
    tokens_per_s: float
    in_flight: int
    waiting: int
    ttft_p50: float | None
    ttft_p95: float | None
    errors_per_min: float
    refused_per_min: float


class History:
    """The readings of the last hour. `clock` is monotonic."""

    def __init__(
        self,
        metrics: Metrics,
        load: Callable[[], Load],
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`load` returns that of now."""
        self._interval_s = interval_s
        self._metrics = metrics
        self._load = load
        self._clock = clock
        # One more than the intervals, and those before the first for its percentiles.
        size = int((SPAN_S + TTFT_SPAN_S) / INTERVAL_S) + 1
        self._readings: deque[Reading] = deque(maxlen=size)
        # What happened before the first reading, INTERVAL_S apart, by the same clock.
        self.earlier: Sequence[Sample] = ()

    async def run(self) -> None:
        """Read the counters now and after each interval, until canceled."""
        while True:
            try:
                self.read()
            except Exception:
                log.exception("the history of the console misses a reading")
            await asyncio.sleep(self._interval_s)

    def read(self) -> None:
        """Add a reading."""
        self._readings.append(self.now())

    def now(self) -> Reading:
        """Return the counters of this moment."""
        return Reading(self._clock(), read_totals(self._metrics), self._load())

    def readings(self) -> Sequence[Reading]:
        """Return all readings, oldest first."""
        return tuple(self._readings)


def last_hour(readings: Sequence[Reading], earlier: Sequence[Sample] = ()) -> list[Sample]:
    """Return what happened in each interval of the last hour, oldest first.

    `earlier` is from before the first reading. Nothing until there are two: the newest sample is
    shown as that of now.
    """
    if len(readings) < 2:
        return []
    since = readings[-1].at - SPAN_S
    return [sample for sample in (*earlier, *samples_of(readings)) if sample.at > since]


def samples_of(readings: Sequence[Reading]) -> list[Sample]:
    """Return a sample for each pair of readings that follow each other."""
    samples: list[Sample] = []
    oldest = 0  # of those whose time to first token is counted
    for number, (before, now) in enumerate(pairwise(readings)):
        while oldest < number and readings[oldest].at < now.at - TTFT_SPAN_S:
            oldest += 1
        elapsed = max(now.at - before.at, 1e-3)
        counts = [
            new - old
            for new, old in zip(now.totals.ttft, readings[oldest].totals.ttft, strict=True)
        ]
        bounds = now.totals.ttft_bounds
        samples.append(
            Sample(
                at=now.at,
                tokens_per_s=tokens_between(before, now) / elapsed,
                in_flight=now.load.in_flight,
                waiting=now.totals.waiting,
                ttft_p50=quantile(0.5, bounds, counts),
                ttft_p95=quantile(0.95, bounds, counts),
                errors_per_min=(now.totals.errors - before.totals.errors) / elapsed * 60,
                refused_per_min=(now.totals.refused - before.totals.refused) / elapsed * 60,
            )
        )
    return samples


def tokens_between(before: Reading, now: Reading) -> int:
    """Return the tokens generated between two readings.

    Those of answers in flight are estimates, which the count of a completed one may fall below.
    """
    counted = now.totals.tokens - before.totals.tokens
    return max(counted + now.load.answer_tokens - before.load.answer_tokens, 0)


def quantile(share: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """Return an estimated quantile of a histogram, as Prometheus's histogram_quantile does.

    `counts` are not cumulative, and have one more than `bounds`: above the last bound, where the
    estimate is that bound. None: there are no values.
    """
    rank = share * sum(counts)
    if rank <= 0:
        return None
    below = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and rank <= count:
            return below + (bound - below) * rank / count
        rank -= count
        below = bound
    return below
