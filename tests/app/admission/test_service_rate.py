"""The service rate of a queue, and the Retry-After that follows from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.admission.service_rate import MAX_RETRY_S, MIN_RETRY_S, WINDOW, ServiceRate, retry_after_s


@pytest.mark.parametrize(
    ("waiting", "served", "seconds", "expected"),
    [
        (20, 10, 5.0, 10),
        (21, 10, 5.0, 11),  # rounded up
        (1, 100, 1.0, 1),
        (0, 5, 1.0, 1),
        (0, 0, 0.0, 1),
        (256, 1, 60.0, 60),
        (3, 0, 5.0, 15),  # none served yet: as if the first were served now
        (256, 0, 0.0, 1),  # no time has passed
    ],
)
def test_retry_after_is_the_time_to_serve_the_queue(
    waiting: int, served: int, seconds: float, expected: int
) -> None:
    assert retry_after_s(waiting, served, seconds) == expected


@given(waiting=st.integers(0, 10**9), served=st.integers(0, 10**9), seconds=st.floats(0, 1e9))
def test_retry_after_is_within_the_bounds(waiting: int, served: int, seconds: float) -> None:
    assert MIN_RETRY_S <= retry_after_s(waiting, served, seconds) <= MAX_RETRY_S


def test_minimum_before_any_request_waited() -> None:
    assert ServiceRate().retry_after_s(0, 1000.0) == MIN_RETRY_S


def test_rate_follows_the_latest_requests() -> None:
    rate = ServiceRate()
    rate.restart(0.0)
    for second in range(WINDOW):
        rate.record_served(float(second))
    for eighth in range(WINDOW + 1):
        rate.record_served(100 + eighth / 8)
    # Eight a second, now that the window holds no others.
    assert rate.retry_after_s(80, 100 + WINDOW / 8) == 10


def test_time_since_the_latest_request_counts() -> None:
    rate = ServiceRate()
    rate.restart(0.0)
    rate.record_served(1.0)
    assert rate.retry_after_s(4, 1.0) == 4
    assert rate.retry_after_s(4, 10.0) == 40


def test_restart_forgets_the_past() -> None:
    rate = ServiceRate()
    rate.restart(0.0)
    rate.record_served(50.0)
    rate.restart(1000.0)
    rate.record_served(1000.5)
    assert rate.retry_after_s(10, 1000.5) == 5
