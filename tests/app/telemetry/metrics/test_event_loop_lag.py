"""How late the event loop was."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.telemetry.metrics.event_loop_lag import TICK_S, Longest, LoopLag

WINDOW_S = 15.0
MOMENTS = st.lists(st.tuples(st.floats(0, 20), st.floats(0, 10)), max_size=30)


class TestLongest:
    def test_nothing_was_noted(self) -> None:
        assert Longest(WINDOW_S).read(5) == 0

    @given(MOMENTS)
    def test_it_has_the_window_and_nothing_older_than_two(
        self, steps: list[tuple[float, float]]
    ) -> None:
        longest = Longest(WINDOW_S)
        now, seen = 0.0, [(0.0, 0.0)]
        for pause, value in steps:
            now += pause
            longest.note(now, value)
            seen.append((now, value))
        within = max((value for at, value in seen if now - at < WINDOW_S), default=0.0)
        not_older = max((value for at, value in seen if now - at <= 2 * WINDOW_S), default=0.0)
        assert within <= longest.read(now) <= not_older

    def test_what_is_over_is_forgotten_although_nothing_is_noted(self) -> None:
        longest = Longest(WINDOW_S)
        longest.note(0, 3)
        assert longest.read(WINDOW_S) == 3
        assert longest.read(3 * WINDOW_S) == 0


@pytest.mark.slow
async def test_a_loop_that_is_blocked_is_late() -> None:
    lag = LoopLag()
    assert lag.read() == 0
    lag.start()
    time.sleep(TICK_S + 0.1)
    async with asyncio.timeout(20):
        while lag.read() < 0.09:  # timers of uvloop have whole milliseconds
            await asyncio.sleep(0)
    lag.stop()
