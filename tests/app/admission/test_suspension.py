"""Requests at no engine: they keep their slot, and engines get no more at once than they may."""

import asyncio
from dataclasses import dataclass

import pytest

from app.admission import Admission, Permit
from app.settings import QueueSettings
from app.telemetry.metrics import Metrics
from engines.base import ChangeNotifier
from tests.waiting import run_pending_tasks


@dataclass
class Scene:
    admission: Admission
    ready: list[int]
    changes: ChangeNotifier

    def permit(self) -> Permit:
        found = self.admission.try_acquire("demo")
        assert found is not None
        return found

    def set_ready(self, count: int) -> None:
        self.ready[0] = count
        self.changes.notify()


@pytest.fixture
def scene() -> Scene:
    """Two READY engines that take one request each."""
    ready, changes = [2], ChangeNotifier()
    settings = {"demo": QueueSettings(max_in_flight=1)}
    return Scene(
        Admission(Metrics(), settings, lambda _, slots: int(slots) * max(ready[0], 1), changes),
        ready,
        changes,
    )


async def test_suspended_request_goes_on_when_another_ends(scene: Scene) -> None:
    with scene.permit() as suspended:
        with scene.permit():
            scene.set_ready(1)
            suspended.suspend()
            resumed = asyncio.create_task(suspended.resume())
            await run_pending_tasks()
            assert not resumed.done(), "the engine that is left has its request"
        assert scene.admission.try_acquire("demo") is None, "no new request overtakes it"
        await run_pending_tasks()
        assert resumed.done()
    assert scene.admission.in_flight == 0


async def test_suspended_request_goes_on_when_an_engine_is_ready(scene: Scene) -> None:
    with scene.permit() as suspended, scene.permit():
        scene.set_ready(1)
        suspended.suspend()
        resumed = asyncio.create_task(suspended.resume())
        await run_pending_tasks()
        scene.set_ready(2)
        await run_pending_tasks()
        assert resumed.done()


async def test_suspended_request_goes_on_when_another_is_suspended(scene: Scene) -> None:
    with scene.permit() as first, scene.permit() as second:
        scene.set_ready(1)
        first.suspend()
        resumed = asyncio.create_task(first.resume())
        await run_pending_tasks()
        second.suspend()
        await run_pending_tasks()
        assert resumed.done()
        again = asyncio.create_task(second.resume())
        await run_pending_tasks()
        assert not again.done()
        again.cancel()


async def test_suspended_request_that_ends_leaves_nothing(scene: Scene) -> None:
    with scene.permit() as suspended:
        suspended.suspend()
        suspended.suspend()
    [queue, _] = scene.admission._all()
    assert (queue.in_flight, queue.suspended) == (0, 0)
