"""The event loop lag and its time window."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.telemetry.metrics.event_loop_lag import TICK_S, EventLoopLag, WindowedMax

WINDOW_S = 15.0
MOMENTS = st.lists(st.tuples(st.floats(0, 20), st.floats(0, 10)), max_size=30)


class TestWindowedMax:
    def test_without_values_is_zero(self) -> None:
        assert WindowedMax(WINDOW_S).read(5) == 0

    @given(MOMENTS)
    def test_covers_one_window_and_at_most_two(self, steps: list[tuple[float, float]]) -> None:
        longest = WindowedMax(WINDOW_S)
        now, seen = 0.0, [(0.0, 0.0)]
        for pause, value in steps:
            now += pause
            longest.add(now, value)
            seen.append((now, value))
        within = max((value for at, value in seen if now - at < WINDOW_S), default=0.0)
        not_older = max((value for at, value in seen if now - at <= 2 * WINDOW_S), default=0.0)
        assert within <= longest.read(now) <= not_older

    def test_old_value_expires_without_new_values(self) -> None:
        longest = WindowedMax(WINDOW_S)
        longest.add(0, 3)
        assert longest.read(WINDOW_S) == 3
        assert longest.read(3 * WINDOW_S) == 0


@pytest.mark.slow
async def test_blocked_loop_reports_its_lag() -> None:
    lag = EventLoopLag()
    assert lag.read() == 0
    lag.start()
    time.sleep(TICK_S + 0.1)
    async with asyncio.timeout(20):
        while lag.read() < 0.09:  # timers of uvloop round to milliseconds
            await asyncio.sleep(0)
    lag.stop()


async def test_each_tick_is_reported() -> None:
    ticked = asyncio.Event()
    lag = EventLoopLag()
    lag.start(ticked.set)
    async with asyncio.timeout(20):
        await ticked.wait()
    lag.stop()
