"""Pages that are kept: the share of the event loop that requests for one can take."""

import pytest

from app.api.kept_page import MAX_AGE_S, MAX_SHARE, KeptPage


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("takes_s", [0.0005, 0.002, 0.015, 0.5])
def test_requests_take_a_bounded_share_of_the_time(takes_s: float) -> None:
    clock, made = Clock(), 0

    def make() -> bytes:
        nonlocal made
        made += 1
        clock.now += takes_s
        return b"page %d" % made

    page = KeptPage(make, clock)
    while clock.now < 10:
        page.read()
        clock.now += 0.0005  # ten clients that ask again at once
    longest = max(MAX_SHARE, takes_s / (takes_s + MAX_AGE_S))
    assert (made - 1) * takes_s / clock.now <= longest + 0.01


def test_page_is_made_again_after_its_age() -> None:
    clock = Clock()

    def make() -> bytes:
        clock.now += 1.0
        return b"made at %d" % clock.now

    page = KeptPage(make, clock)
    assert page.read() == b"made at 1"
    clock.now += MAX_AGE_S - 0.01
    assert page.read() == b"made at 1"
    clock.now += 0.02
    assert page.read() == b"made at 3"
