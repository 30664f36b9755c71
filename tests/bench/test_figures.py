import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import strategies as st

from bench.figures import (
    Estimate,
    estimate,
    gaps,
    longest_busy,
    longest_gap,
    median_interval,
    percentile,
    ratio,
    ratio_of_added,
    slope,
    stall_free,
)

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@pytest.mark.parametrize(
    ("q", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100)]
)
def test_percentile_is_the_nearest_rank(q: float, expected: float) -> None:
    assert percentile(range(100, 0, -1), q) == expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(3.0, 2.0, 1.5), (None, 2.0, None), (3.0, None, None), (3.0, 0.0, None), (3.0, -1.0, None)],
)
def test_ratio_is_none_where_undefined(
    a: float | None, b: float | None, expected: float | None
) -> None:
    assert ratio(a, b) == expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (3.0, 2.0, 1.5),
        (None, 2.0, None),
        (3.0, None, None),
        (3.0, 0.0, math.inf),
        (3.0, -1.0, math.inf),
        (0.0, 2.0, 0.0),
        (-1.0, 2.0, 0.0),
        (-1.0, -2.0, 0.0),
    ],
)
def test_an_amount_below_the_noise_adds_nothing(
    a: float | None, b: float | None, expected: float | None
) -> None:
    assert ratio_of_added(a, b) == expected


def test_an_estimate_is_of_the_rounds_that_have_a_value() -> None:
    assert estimate([None, 3.0, 1.0, None, 2.0]) == Estimate(2.0, None)
    assert estimate([5.0, 1.0, 6.0, 2.0, 4.0, 3.0]) == Estimate(3.5, (1.0, 6.0))
    assert estimate([None]) is None


# Which values bound the interval, counted from the smallest and from the largest: the published
# tables for the median at 95 %.
RANKS = {6: 1, 7: 1, 8: 1, 9: 2, 10: 2, 11: 2, 12: 3, 13: 3, 14: 3, 15: 4}


@pytest.mark.parametrize(("count", "rank"), RANKS.items())
def test_the_interval_has_the_ranks_of_the_published_tables(count: int, rank: int) -> None:
    assert median_interval([float(n) for n in range(count, 0, -1)]) == (rank, count + 1 - rank)


@pytest.mark.parametrize("count", range(6))
def test_fewer_than_six_rounds_have_no_interval(count: int) -> None:
    assert median_interval([1.0] * count) is None


@pytest.mark.parametrize("count", range(6, 12))
def test_the_interval_covers_the_median_in_95_percent_of_all_samples(count: int) -> None:
    # Each value is as likely below the median, here 0, as above it.
    covered = 0
    for signs in itertools.product((-1, 1), repeat=count):
        found = median_interval([sign * (n + 1.0) for n, sign in enumerate(signs)])
        assert found is not None
        covered += found[0] <= 0 <= found[1]

    assert Fraction(95, 100) <= Fraction(covered, 2**count) <= Fraction(993, 1000)


ROUNDS = st.lists(st.floats(0.001, 1e6), min_size=6, max_size=15)


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


def test_slope_is_the_least_squares_slope() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert slope([(0, 0), (1, 1), (2, 0), (3, 1)]) == pytest.approx(0.2)


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(1.0, 1.0), (1.0, 2.0)]])
def test_slope_of_too_few_points_is_none(points: list[tuple[float, float]]) -> None:
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
