"""The arithmetic of the benchmarks: no clocks, no files, no processes."""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise


def percentile(values: Iterable[float], q: float) -> float | None:
    """Return the nearest-rank percentile, `q` from 0 to 1; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of what was measured; None if nothing was."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b, or None where one is missing or b is not a positive amount."""
    return None if a is None or b is None or b <= 0 else a / b


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
    """Whether a stream, once begun, never kept its reader waiting for more than three paces."""
    return max(gaps(reads), default=0.0) <= 3 * pace_s


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the slope of the least-squares line through (x, y) points, in y per x."""
    if len({x for x, _ in points}) < 2:
        return None
    line = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return line.slope
