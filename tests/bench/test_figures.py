import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import (
    difference,
    gaps,
    longest_busy,
    longest_gap,
    median,
    percentile,
    ratio,
    slope,
    stall_free,
)

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@pytest.mark.parametrize(
    ("q", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100)]
)
def test_percentile_is_the_nearest_rank(q: float, expected: float) -> None:
    assert percentile(range(100, 0, -1), q) == expected


def test_percentile_of_nothing_is_nothing() -> None:
    assert percentile([], 0.5) is None


@given(NUMBERS, st.floats(0, 1))
def test_percentile_is_one_of_the_values(values: list[float], q: float) -> None:
    assert percentile(values, q) in values


def test_median_passes_over_what_was_not_measured() -> None:
    assert median([None, 3.0, 1.0, None, 2.0]) == 2.0
    assert median([None]) is None


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(3.0, 2.0, 1.5), (None, 2.0, None), (3.0, None, None), (3.0, 0.0, None), (3.0, -1.0, None)],
)
def test_ratio_is_nothing_where_it_means_nothing(
    a: float | None, b: float | None, expected: float | None
) -> None:
    assert ratio(a, b) == expected


def test_difference() -> None:
    assert difference(3.0, 1.0) == 2.0
    assert difference(None, 1.0) is None
    assert difference(1.0, None) is None


def test_gaps_are_between_reads() -> None:
    assert gaps([1.0, 3.0, 3.5]) == [2.0, 0.5]
    assert gaps([1.0]) == gaps([]) == []


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ([5.0], True),  # the wait for the first is not a stall
        ([0.0, 0.25, 1.0], True),  # three paces are not more than three
        ([0.0, 0.25, 1.0625], False),
        ([0.0, 0.8125, 0.875], False),
    ],
)
def test_a_stall_is_a_gap_of_more_than_three_paces(reads: list[float], expected: bool) -> None:
    assert stall_free(reads, 0.25) is expected


def test_slope_is_that_of_the_least_squares_line() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert slope([(0, 0), (1, 1), (2, 0), (3, 1)]) == pytest.approx(0.2)


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(1.0, 1.0), (1.0, 2.0)]])
def test_slope_of_too_little_is_nothing(points: list[tuple[float, float]]) -> None:
    assert slope(points) is None


STREAMS = [[0.0, 1.0, 1.5, 5.0], [0.5, 2.0], [3.0]]


@pytest.mark.parametrize(
    ("began", "ended", "expected"),
    [
        (0.0, 9.0, 3.5),
        (1.1, 1.4, 1.5),  # two gaps are under way, and both count as a whole
        (1.6, 1.7, 3.5),  # a gap that begins before the period and ends after it
        (0.0, 0.5, 1.0),  # the next gap begins when the period ends
        (5.0, 9.0, None),  # the last gap ended when the period begins
    ],
)
def test_the_longest_gap_is_one_that_overlaps_the_period(
    began: float, ended: float, expected: float | None
) -> None:
    assert longest_gap(STREAMS, began, ended) == expected


def test_a_wait_is_busy_for_no_longer_than_it_lasts_or_computes() -> None:
    waits = [(0.0, 1.0), (1.0, 5.0), (5.0, 6.0), (6.0, 20.0)]
    cpu_s = [0.5, 0.25, 2.0, 14.0]  # two threads compute for longer than a clock shows

    assert longest_busy(waits, cpu_s, 0.0, 6.0) == 1.0
    assert longest_busy(waits, cpu_s, 0.0, 5.0) == 0.5
    assert longest_busy(waits, cpu_s, 1.5, 2.0) == 0.25
    assert longest_busy([], [], 0.0, 1.0) is None
