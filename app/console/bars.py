"""Bar charts as rectangles of SVG: a bar for each day, in parts on top of each other. Pure.

Bars are drawn in the box of line charts (`charts`), which the page stretches to its width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from app.console.charts import HEIGHT, TOP, WIDTH, scale

# The part of a day's width that its bar takes.
_FILLED = 0.8
# At most, below the bars.
_LABELS = 6


@dataclass(frozen=True, slots=True)
class BarPart:
    """A part of a bar, from `y` down."""

    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Bar:
    """The bar of a day; its parts are in the order of the series, the first at the bottom."""

    day: str
    values: tuple[int, ...]
    x: float
    parts: tuple[BarPart, ...]


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars on one scale, from 0 to `top`."""

    bars: tuple[Bar, ...]
    bar_width: float
    top: float
    # Distance of the lines of the grid.
    step: float
    first: str
    last: str
    totals: tuple[int, ...]
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def grid(self) -> list[tuple[float, float]]:
        """The values of the grid above the base, each with its y."""
        values = (self.step * number for number in range(1, round(self.top / self.step) + 1))
        return [(value, HEIGHT - (HEIGHT - TOP) * value / self.top) for value in values]

    @property
    def labels(self) -> list[tuple[str, float]]:
        """Days at equal distances, each with the middle of its bar in percent of the width."""
        first = date.fromisoformat(self.first)
        days = (date.fromisoformat(self.last) - first).days + 1
        shown = range(0, days, -(-days // _LABELS))
        return [
            ((first + timedelta(days=day)).isoformat(), 100 * (day + 0.5) / days) for day in shown
        ]


def bar_chart(
    by_day: Mapping[str, Sequence[int]], series: int, first: date, last: date
) -> BarChart:
    """Return the chart of `series` numbers a day; days without numbers have no bar."""
    days = (last - first).days + 1
    values = {day: tuple(max(one, 0) for one in found) for day, found in by_day.items()}
    top, grid = scale(max(map(sum, values.values()), default=0), whole=True)
    step = WIDTH / days
    bars: list[Bar] = []
    for number in range(days):
        day = (first + timedelta(days=number)).isoformat()
        if any(found := values.get(day, ())):
            x = number * step + step * (1 - _FILLED) / 2
            bars.append(Bar(day, found, x, _parts(found, top)))
    totals = tuple(sum(bar.values[place] for bar in bars) for place in range(series))
    return BarChart(
        tuple(bars), step * _FILLED, top, grid, first.isoformat(), last.isoformat(), totals
    )


def _parts(values: Sequence[int], top: float) -> tuple[BarPart, ...]:
    parts: list[BarPart] = []
    y = float(HEIGHT)
    for value in values:
        height = (HEIGHT - TOP) * value / top
        y -= height
        parts.append(BarPart(y, height))
    return tuple(parts)
