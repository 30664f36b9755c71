"""The bar of a request: its parts fill it, in order, and all can be seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.console.request_bar import MIN_WIDTH, TITLES, WIDTH, request_bar
from app.telemetry import RequestPhase


def phases_of(durations: list[float]) -> list[RequestPhase]:
    found, at = [], 0.0
    for number, lasts in enumerate(durations):
        found.append(
            RequestPhase(list(TITLES)[number % len(TITLES)], at, at + lasts, f"n {number}")
        )
        at += lasts
    return found


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=50))
def test_the_parts_fill_the_bar_in_order(durations: list[float]) -> None:
    phases = phases_of(durations)
    parts = request_bar(phases, phases[-1].end_s)
    assert [part.name for part in parts] == [phase.name for phase in phases]
    x = 0.0
    for part in parts:
        assert part.x == pytest.approx(x)
        assert part.width > 0
        x += part.width
    assert x == pytest.approx(WIDTH)
    assert sum(part.share for part in parts) == pytest.approx(1.0)


@pytest.mark.parametrize("number", [499, 500, 501, 5000])
def test_any_number_of_parts_fits(number: int) -> None:
    parts = request_bar(phases_of([1.0] * number), float(number))
    assert min(part.width for part in parts) > 0
    assert parts[-1].x + parts[-1].width == pytest.approx(WIDTH)


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=100))
def test_a_part_of_a_moment_can_be_seen(durations: list[float]) -> None:
    phases = phases_of(durations)
    assert min(part.width for part in request_bar(phases, phases[-1].end_s)) >= MIN_WIDTH


def test_a_longer_part_is_wider_and_says_how_long_it_was() -> None:
    short, long = request_bar(phases_of([1.0, 3.0]), 4.0)
    assert (short.start_s, short.duration_s, short.share) == (0.0, 1.0, 0.25)
    assert (long.start_s, long.duration_s, long.share) == (1.0, 3.0, 0.75)
    assert short.width < long.width
    assert (short.title, short.note) == (TITLES["auth"], "n 0")


def test_an_unknown_phase_has_its_name_as_title() -> None:
    (part,) = request_bar([RequestPhase("new", 0.0, 1.0)], 1.0)
    assert part.title == "new"


@pytest.mark.parametrize("total_s", [0.0, -1.0])
def test_without_time_or_phases_there_is_no_bar(total_s: float) -> None:
    assert request_bar(phases_of([1.0]), total_s) == []
    assert request_bar([], 1.0) == []
