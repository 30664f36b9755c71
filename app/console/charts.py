"""Line charts as paths of SVG. Pure: numbers in, text out.

A path is drawn in a box of WIDTH by HEIGHT units. HEIGHT is in pixels; the page stretches the width
to what it has. Grid, labels and marks are beside the paths, at percents of the width, so that
nothing but the lines is stretched (`docs/decisions/0055-charts.md`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

WIDTH = 360
HEIGHT = 160
# Room for the width of a line at the top.
TOP = 5
# At most, between the base and the top of a scale, and between the ends of a time.
_STEPS = 5
_TIMES = 6
# Distances of labels of time, in seconds.
_TIME_STEPS = (60, 300, 600, 900, 1800, 3600, 7200, 10_800, 14_400, 21_600, 43_200, 86_400)
# Percent of the width in which a label beside an end would be cut off.
_MARGIN = 4.0

# A moment and its value; None: there was none, and the line has a gap.
Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart, and the area below it."""

    path: str
    area: str
    last: float | None  # the newest value
    highest: float | None


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines on one scale, from 0 to `top`, between two moments."""

    lines: tuple[Line, ...]
    top: float
    # Distance of the lines of the grid.
    step: float
    # In seconds of the clock of the points; add `epoch` for those since 1970.
    begin: float
    end: float
    epoch: float = 0.0
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def grid(self) -> list[tuple[float, float]]:
        """The values of the grid above the base, each with its y."""
        values = (self.step * number for number in range(1, round(self.top / self.step) + 1))
        return [(value, _y(value, self.top)) for value in values]

    @property
    def times(self) -> list[tuple[float, float]]:
        """Round moments since 1970, each with its place in percent of the width."""
        begin, end = self.begin + self.epoch, self.end + self.epoch
        fitting = (step for step in _TIME_STEPS if (end - begin) / step <= _TIMES)
        step = next(fitting, _TIME_STEPS[-1])
        first, last = ceil(begin / step), floor(end / step)
        found = ((number * step, self.percent(number * step)) for number in range(first, last + 1))
        return [(at, x) for at, x in found if _MARGIN <= x <= 100 - _MARGIN]

    def percent(self, at: float) -> float:
        """Return the place of a moment since 1970, in percent of the width."""
        return 100 * (at - self.epoch - self.begin) / max(self.end - self.begin, 1e-9)


def chart(
    series: Sequence[Sequence[Point]],
    begin: float,
    end: float,
    gap: float,
    *,
    epoch: float = 0.0,
    whole: bool = False,
) -> Chart:
    """Return the chart of some series between two moments.

    Points further apart than `gap` are not connected. Moments plus `epoch` are since 1970. The grid
    of `whole` numbers has no fractions.
    """
    found = [value for points in series for _, value in points if value is not None]
    top, step = scale(max(found, default=0.0), whole=whole)
    lines = tuple(_line(points, begin, end, gap, top) for points in series)
    return Chart(lines, top, step, begin, end, epoch)


def scale(value: float, *, whole: bool = False) -> tuple[float, float]:
    """Return the end of a scale that has a value, and the step of its grid: round numbers.

    The end is 1 for what is not positive or not finite.
    """
    if not isfinite(value) or value < 1e-9:
        return 1.0, 1.0
    power = 10.0 ** (floor(log10(value)) - 1)
    quarter = 3 if whole and power == 1 else 2.5  # two and a half is no whole number
    for factor in (1, 2, quarter, 5, 10, 20, 25, 50):
        step = max(factor * power, 1.0) if whole else factor * power
        count = ceil(value / step - 1e-9)
        if count <= _STEPS and (not whole or step == int(step)):
            return count * step, step
    return value, value


def _line(points: Sequence[Point], start: float, end: float, gap: float, top: float) -> Line:
    path: list[str] = []
    area: list[str] = []
    for piece in _pieces(points, start, end, gap):
        places = [(_x(at, start, end), _y(value, top)) for at, value in piece]
        drawn = " ".join(f"{x:.1f},{y:.2f}" for x, y in places)
        # A line without length is a dot, by its round ends.
        path.append(f"M{drawn}" if len(places) > 1 else f"M{drawn}h0")
        area.append(f"M{places[0][0]:.1f},{HEIGHT} {drawn} {places[-1][0]:.1f},{HEIGHT}Z")
    values = [value for _, value in points if value is not None]
    last = points[-1][1] if points else None
    return Line("".join(path), "".join(area), last, max(values, default=None))


def _pieces(
    points: Sequence[Point], start: float, end: float, gap: float
) -> Iterator[list[tuple[float, float]]]:
    """Yield the points of each part of a line that is connected."""
    piece: list[tuple[float, float]] = []
    for at, value in points:
        known = value is not None and isfinite(value) and start <= at <= end
        if piece and (not known or at - piece[-1][0] > gap):
            yield piece
            piece = []
        if known and value is not None:
            piece.append((at, value))
    if piece:
        yield piece


def _x(at: float, start: float, end: float) -> float:
    return WIDTH * (at - start) / max(end - start, 1e-9)


def _y(value: float, top: float) -> float:
    return HEIGHT - (HEIGHT - TOP) * min(max(value / top, 0.0), 1.0)
