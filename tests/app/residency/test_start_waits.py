"""Requests that wait for a start: counted, bounded and canceled."""

import asyncio

import pytest

from app.errors import EngineOverloaded
from app.residency.start_waits import ForecastNotifier, StartWaits
from app.telemetry.metrics import Metrics


class Waits:
    """A queue for starts, and its metrics; a wait is over when `up` is set."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.changes = ForecastNotifier()
        self.starts = StartWaits(self.metrics, self.changes)
        self.up = False
        self.order: list[int] = []

    def metric(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"model": "demo"}) or 0.0

    async def wait(self, number: int = 0, most: int = 8, key: str = "key") -> float:
        waited = await self.starts.wait("demo", key, most, lambda: self.up)
        self.order.append(number)
        return waited.waited_s

    def become_up(self) -> None:
        self.up = True
        self.changes.notify()

    async def waiting(self, count: int) -> list[asyncio.Task[float]]:
        tasks = [asyncio.create_task(self.wait(number)) for number in range(count)]
        await asyncio.sleep(0)
        assert self.starts.waiting("demo") == count
        return tasks


@pytest.fixture
def waits() -> Waits:
    return Waits()


async def test_waits_end_in_order_and_are_counted_as_a_queue(waits: Waits) -> None:
    tasks = await waits.waiting(5)
    assert waits.metric("gateway_queue_depth") == 5
    waits.become_up()
    assert all(waited_s > 0 for waited_s in await asyncio.gather(*tasks))
    assert waits.order == [0, 1, 2, 3, 4]
    assert waits.metric("gateway_queue_depth") == 0
    assert waits.metric("gateway_queue_wait_seconds_count") == 5
    assert waits.starts.waiting("demo") == 0


async def test_wait_that_is_over_returns_at_once(waits: Waits) -> None:
    waits.up = True
    with pytest.raises(StopIteration):
        waits.wait().send(None)


async def test_number_of_waits_is_bounded(waits: Waits) -> None:
    tasks = await waits.waiting(2)
    with pytest.raises(EngineOverloaded, match="'demo' is starting and has as many"):
        await waits.wait(most=2)
    assert waits.starts.waiting("demo") == 2
    waits.become_up()
    await asyncio.gather(*tasks)


async def test_key_that_fills_the_queue_gives_places_to_others(waits: Waits) -> None:
    tasks = await waits.waiting(4)
    others = [asyncio.create_task(waits.wait(10 + n, most=4, key="other")) for n in range(3)]
    refused = await asyncio.gather(tasks[2], tasks[3], others[2], return_exceptions=True)
    assert [type(error) for error in refused] == [EngineOverloaded] * 3
    assert waits.starts.waiting("demo") == 4
    assert waits.metric("gateway_queue_depth") == 4
    waits.become_up()
    await asyncio.gather(*tasks[:2], *others[:2])
    assert waits.order == [0, 1, 10, 11]
    assert waits.starts.waiting("demo") == 0


async def test_canceled_wait_leaves_nothing(waits: Waits) -> None:
    tasks = await waits.waiting(3)
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert waits.starts.waiting("demo") == 2
    assert waits.metric("gateway_queue_depth") == 2
    waits.become_up()
    await asyncio.gather(tasks[0], tasks[2])
    assert waits.order == [0, 2]
    assert waits.metric("gateway_queue_depth") == 0


async def test_forecast_is_read_again_as_time_passes(
    waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.residency.start_waits.FORECAST_S", 0.001)
    tasks = await waits.waiting(1)
    waits.up = True
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks)
