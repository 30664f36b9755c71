"""How long requests took, as bars whose links filter the page of requests."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from urllib.parse import urlencode

from app.console.formats import duration
from app.console.language import gettext

# Upper ends of the bars in seconds; the last bar has what took longer.
BOUNDS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
HEIGHT = 56
# A bar of a few requests is still seen.
_LEAST = 2.0


@dataclass(frozen=True, slots=True)
class DurationBar:
    """A bar at `x` percent of the width; it is above `y` and ends at HEIGHT."""

    title: str
    count: int
    x: float
    y: float
    path: str
    current: bool


@dataclass(frozen=True, slots=True)
class DurationHistogram:
    """The bars, and quantiles in seconds; the width of a bar is in percent."""

    bars: Sequence[DurationBar]
    # Places in percent, and bounds as text.
    ticks: Sequence[tuple[float, str]]
    total: int
    median_s: float
    p95_s: float
    width: float = 100 / (len(BOUNDS_S) + 1)
    height: int = HEIGHT


def duration_histogram(
    durations: Sequence[float], page: str, slower_s: str = "", at_most_s: str = ""
) -> DurationHistogram | None:
    """Return the histogram of durations in seconds; None: there are fewer than two.

    `page` is the path of the page without a filter of durations; `slower_s` and `at_most_s` are the
    present one.
    """
    if len(durations) < 2:
        return None
    ordered = sorted(durations)
    ends = [0, *(_not_above(ordered, bound) for bound in BOUNDS_S), len(ordered)]
    counts = [after - before for before, after in pairwise(ends)]
    highest, step = max(counts), 100 / len(counts)
    bars = []
    for place, number in enumerate(counts):
        low = f"{BOUNDS_S[place - 1]:g}" if place else ""
        high = f"{BOUNDS_S[place]:g}" if place < len(BOUNDS_S) else ""
        height = max((HEIGHT - _LEAST) * number / highest, _LEAST) if number else 0.0
        current = (low, high) == (slower_s, at_most_s)
        # Pressing the bar that is chosen shows all again.
        path = page if current else _with(page, slower_than_s=low, at_most_s=high)
        bars.append(
            DurationBar(_title(low, high), number, place * step, HEIGHT - height, path, current)
        )
    ticks = [((at + 1) * step, _tick(bound)) for at, bound in enumerate(BOUNDS_S)]
    return DurationHistogram(
        bars, ticks, len(ordered), _quantile(ordered, 0.5), _quantile(ordered, 0.95)
    )


def _not_above(ordered: Sequence[float], bound: float) -> int:
    """Return how many values are at most a bound."""
    return bisect_left(ordered, bound + 1e-9)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[ceil(share * len(ordered)) - 1]


def _title(low: str, high: str) -> str:
    if not low:
        return gettext("at most %(duration)s", duration=duration(float(high)))
    if not high:
        return gettext("over %(duration)s", duration=duration(float(low)))
    return gettext("%(low)s to %(high)s", low=duration(float(low)), high=duration(float(high)))


def _tick(bound: float) -> str:
    return f"{bound * 1000:g} ms" if bound < 1 else f"{bound:g} s"


def _with(page: str, **fields: str) -> str:
    given = {name: value for name, value in fields.items() if value}
    return f"{page}{'&' if '?' in page else '?'}{urlencode(given)}"
