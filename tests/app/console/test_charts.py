"""Charts: every line is within its box, and has gaps where nothing was measured."""

import math
import re

from hypothesis import example, given
from hypothesis import strategies as st

from app.console.charts import HEIGHT, TOP, WIDTH, Point, chart, scale

_VALUES = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1e12))


def points_of(path: str) -> list[tuple[float, float]]:
    """Return the absolute coordinates of a path."""
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", path)]


@given(st.lists(st.tuples(st.floats(-100, 4000), _VALUES), max_size=50))
def test_a_line_never_leaves_its_box(points: list[Point]) -> None:
    drawn = chart([sorted(points, key=lambda point: point[0])], 0, 3600, 25)
    for path in (drawn.lines[0].path, drawn.lines[0].area):
        assert "nan" not in path
        assert "inf" not in path
        for x, y in points_of(path):
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT


@given(st.floats(1e-6, 1e15))
def test_the_scale_ends_at_a_round_number_that_is_not_much_larger(value: float) -> None:
    top, step = scale(value)
    assert value * (1 - 1e-6) <= top <= 1.3334 * value
    lead = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(lead - round_number) for round_number in (1, 2, 2.5, 5, 10)) < 1e-6
    assert 1 <= round(top / step) <= 5


@given(st.integers(1, 10**9))
@example(11)
def test_the_grid_of_whole_numbers_has_no_fractions(value: int) -> None:
    top, step = scale(value, whole=True)
    assert value <= top <= max(1.3334 * value, value + 1)
    assert (step == int(step), top == int(top)) == (True, True)


def test_a_scale_without_values_ends_at_one() -> None:
    assert [scale(value)[0] for value in (0.0, -3.0, math.inf, math.nan)] == [1.0] * 4


@given(st.floats(0, 2e9), st.sampled_from([900, 3600, 21_600, 86_400, 604_800]))
def test_times_are_round_and_within_the_chart(epoch: float, span: int) -> None:
    drawn = chart([[]], 50.0, 50.0 + span, 25, epoch=epoch)
    places = [x for _, x in drawn.times]
    assert 1 <= len(places) <= 7
    assert places == sorted(places)
    assert all(at % 60 == 0 and 4 <= x <= 96 for at, x in drawn.times)


def test_time_without_a_value_is_a_gap() -> None:
    points: list[Point] = [(0, 1.0), (10, 1.0), (20, None), (30, 1.0), (100, 1.0), (110, 1.0)]
    (line,) = chart([points], 0, 200, 25).lines
    assert line.path.count("M") == 3
    assert line.path.count("h0") == 1  # a point without neighbors is a dot


def test_both_lines_have_one_scale() -> None:
    drawn = chart([[(0, 1.0), (10, 1.0)], [(0, 9.0), (10, 10.0)]], 0, 10, 25)
    assert drawn.top == 10
    low, high = (points_of(line.path)[-1] for line in drawn.lines)
    assert high == (WIDTH, TOP)
    assert low[1] > high[1]
    assert [(line.last, line.highest) for line in drawn.lines] == [(1.0, 1.0), (10.0, 10.0)]


def test_without_points_there_is_no_line() -> None:
    (line,) = chart([[]], 0, 3600, 25).lines
    assert (line.path, line.area, line.last, line.highest) == ("", "", None, None)
