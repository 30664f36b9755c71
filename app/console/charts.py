"""Line charts as paths of SVG. Pure: numbers in, text out.

A path is drawn in a box of WIDTH by HEIGHT units, which the page stretches to the width that it
has; so labels are text beside it, and lines have a width in pixels (`vector-effect`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

WIDTH = 360
HEIGHT = 100
# Room for the width of a line at the top.
TOP = 4

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
    """Lines on one scale, from 0 to `top`."""

    lines: tuple[Line, ...]
    top: float
    width: int = WIDTH
    height: int = HEIGHT


def chart(series: Sequence[Sequence[Point]], start: float, end: float, gap: float) -> Chart:
    """Return the chart of some series between two moments.

    Points further apart than `gap` are not connected. The scale ends at the next round number.
    """
    found = [value for points in series for _, value in points if value is not None]
    top = round_up(max(found, default=0.0))
    return Chart(tuple(_line(points, start, end, gap, top) for points in series), top)


def round_up(value: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten; 1 for what is not positive or not finite."""
    if not isfinite(value) or value < 1e-9:
        return 1.0
    power = 10.0 ** floor(log10(value))
    # Floating point may put the power just above or below the value.
    steps = (factor * power for factor in (0.5, 1, 2, 5, 10))
    return next((step for step in steps if step >= value), float(ceil(value)))


def _line(points: Sequence[Point], start: float, end: float, gap: float, top: float) -> Line:
    path: list[str] = []
    area: list[str] = []
    for piece in _pieces(points, start, end, gap):
        places = [(_x(at, start, end), _y(value, top)) for at, value in piece]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
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
