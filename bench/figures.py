"""The arithmetic of the benchmarks: no clocks, no files, no processes."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

TAIL = 0.025  # of each end of a 95 % interval


@dataclass(frozen=True, slots=True)
class Estimate:
    """The median of a figure over the rounds, and its 95 % confidence interval.

    The interval is None where there are too few rounds for one.
    """

    median: float
    interval: tuple[float, float] | None


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Return the estimate from the rounds that have a value; None if none has."""
    known = [value for value in values if value is not None]
    return Estimate(statistics.median(known), median_interval(known)) if known else None


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the median; None of fewer than six values.

    It reaches from the k-th smallest to the k-th largest value. It misses the median only when
    fewer than k values lie on one side of it, and their number is binomial with p = 1/2 for every
    distribution; k is the largest for which that has a probability of at most 2.5 % for each side.
    Six values give 96.9 %, nine 96.1 %, fifteen 96.5 %; the range of five gives 93.75 %, so five
    have no interval. Source: H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition,
    section 7.1, distribution-free confidence intervals for quantiles.
    """
    ordered, count = sorted(values), len(values)
    k, fewer = 0, 0.0
    while (fewer := fewer + math.comb(count, k) / 2**count) <= TAIL:
        k += 1
    return (ordered[k - 1], ordered[count - k]) if k else None


def percentile(values: Iterable[float], q: float) -> float | None:
    """Return the nearest-rank percentile, `q` from 0 to 1; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the measured values; None if there are none."""
    found = estimate(values)
    return None if found is None else found.median


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b, or None where one is missing or b is not a positive amount."""
    return None if a is None or b is None or b <= 0 else a / b


def ratio_of_added(a: float | None, b: float | None) -> float | None:
    """Return a / b of two amounts that were added, either of which may be lost in the noise.

    An `a` that is not positive adds nothing: 0. A `b` that is not, while `a` is: infinity. So
    a comparison leaves out no round because of what was measured in it.
    """
    if a is None or b is None:
        return None
    return 0.0 if a <= 0 else math.inf if b <= 0 else a / b


def difference(a: float | None, b: float | None) -> float | None:
    """Return a - b, or None where one is missing."""
    return None if a is None or b is None else a - b


def gaps(reads: Sequence[float]) -> list[float]:
    """Return the times between successive reads."""
    return [later - earlier for earlier, later in pairwise(reads)]


def longest_gap(sequences: Iterable[Sequence[float]], began: float, ended: float) -> float | None:
    """Return the longest gap that any sequence of times has at least partly in a period."""
    overlapping = (
        later - earlier
        for times in sequences
        for earlier, later in pairwise(times)
        if later > began and earlier < ended
    )
    return max(overlapping, default=None)


def longest_busy(
    waits: Iterable[Sequence[float]], cpu_s: Iterable[float], began: float, ended: float
) -> float | None:
    """Return the longest wait in a period, each capped at the CPU time spent during it.

    A wait is a pair of times. Time beyond the cap went to other programs.
    """
    busy = (
        min(answered - asked, spent)
        for (asked, answered), spent in zip(waits, cpu_s, strict=True)
        if answered > began and asked < ended
    )
    return max(busy, default=None)


def stall_free(reads: Sequence[float], pace_s: float) -> bool:
    """Return whether a stream, after its first chunk, never stalled for over three intervals."""
    return max(gaps(reads), default=0.0) <= 3 * pace_s


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the slope of the least-squares line through (x, y) points, in y per x."""
    if len({x for x, _ in points}) < 2:
        return None
    line = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return line.slope
