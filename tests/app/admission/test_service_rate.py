"""When one who finds a full queue is told to come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.admission.service_rate import MAX_RETRY_S, MIN_RETRY_S, WINDOW, ServiceRate, retry_after_s


@pytest.mark.parametrize(
    ("waiting", "served", "seconds", "told"),
    [
        (20, 10, 5.0, 10),
        (21, 10, 5.0, 11),  # rounded up
        (1, 100, 1.0, 1),
        (0, 5, 1.0, 1),
        (0, 0, 0.0, 1),
        (256, 1, 60.0, 60),
        (3, 0, 5.0, 15),  # none went yet: as if the first went now
        (256, 0, 0.0, 1),  # all came at once, and nothing is known
    ],
)
def test_it_is_how_long_those_who_wait_will_take(
    waiting: int, served: int, seconds: float, told: int
) -> None:
    assert retry_after_s(waiting, served, seconds) == told


@given(waiting=st.integers(0, 10**9), served=st.integers(0, 10**9), seconds=st.floats(0, 1e9))
def test_it_is_always_within_the_bounds(waiting: int, served: int, seconds: float) -> None:
    assert MIN_RETRY_S <= retry_after_s(waiting, served, seconds) <= MAX_RETRY_S


def test_nothing_is_known_before_anybody_waited() -> None:
    assert ServiceRate().retry_after_s(0, 1000.0) == MIN_RETRY_S


def test_it_follows_those_who_went_last() -> None:
    pace = ServiceRate()
    pace.begin(0.0)
    for second in range(WINDOW):
        pace.served(float(second))
    for eighth in range(WINDOW + 1):
        pace.served(100 + eighth / 8)
    # Eight a second, now that the window holds no others.
    assert pace.retry_after_s(80, 100 + WINDOW / 8) == 10


def test_silence_since_the_last_one_counts() -> None:
    pace = ServiceRate()
    pace.begin(0.0)
    pace.served(1.0)
    assert pace.retry_after_s(4, 1.0) == 4
    assert pace.retry_after_s(4, 10.0) == 40


def test_it_begins_anew_when_somebody_waits_again() -> None:
    pace = ServiceRate()
    pace.begin(0.0)
    pace.served(50.0)
    pace.begin(1000.0)
    pace.served(1000.5)
    assert pace.retry_after_s(10, 1000.5) == 5
