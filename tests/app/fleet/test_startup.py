"""EngineLifecycle: when the start of the engines has settled."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

from app.fleet import EngineLifecycle
from app.residency import OnDemandLoader
from app.routing import Catalogue, Model, Replica
from app.telemetry.metrics import Metrics
from engines.base import EngineNotReady, EngineState
from engines.process import ProcessEngine
from tests.app.fleet.fleets import settings_in_force
from tests.app.routing.fakes import FakeEngine
from tests.waiting import PATIENCE_S, run_pending_tasks


class Startable(FakeEngine):
    """An engine whose start ends when a test says so."""

    def __init__(self) -> None:
        super().__init__(state=EngineState.STARTING)
        self.ended = asyncio.Event()

    async def ensure_ready(self, deadline: float) -> None:
        await self.ended.wait()
        if self.state is not EngineState.READY:
            raise EngineNotReady("stopped")


async def test_start_settles_when_an_operator_stops_the_only_engine(tmp_path: Path) -> None:
    engine = Startable()
    catalogue = Catalogue([Model("demo", (), (Replica(engine, "demo"),))])
    loader = cast(OnDemandLoader, None)
    lifecycle = EngineLifecycle(catalogue, loader, Metrics(), tmp_path, settings_in_force())
    lifecycle.start()
    await run_pending_tasks()
    assert not lifecycle.startup_done.is_set()
    engine.state = EngineState.STOPPED
    engine.ended.set()
    async with asyncio.timeout(PATIENCE_S):
        await lifecycle.startup_done.wait()
    await lifecycle.cancel_start()


class GivesUp(FakeEngine):
    """A managed engine that fails, until a test gives it up."""

    capabilities = ProcessEngine.capabilities
    broken = False

    @property
    def given_up(self) -> bool:
        return self.broken

    async def ensure_ready(self, deadline: float) -> None:
        self.state = EngineState.FAILED
        raise EngineNotReady("no place")


@pytest.mark.parametrize("reloaded", [False, True])
async def test_start_is_hopeless_if_all_engines_give_up_and_no_reload_replaces_them(
    reloaded: bool, tmp_path: Path
) -> None:
    first, second = GivesUp("a-0"), GivesUp("b-0")
    models = [Model(e.name, (), (Replica(e, e.name),)) for e in (first, second)]
    catalogue = Catalogue(models)
    lifecycle = EngineLifecycle(
        catalogue, cast(OnDemandLoader, None), Metrics(), tmp_path, settings_in_force()
    )
    lifecycle.start()
    await lifecycle.engines_tried.wait()
    first.broken = True
    if reloaded:  # without any engine for a moment
        second.retired, second.state = True, EngineState.STOPPED
        catalogue.replace([])
        await run_pending_tasks()
        assert not lifecycle.startup_done.is_set()
        new = FakeEngine("c-0")
        catalogue.replace([Model("c", (), (Replica(new, "c"),))])
    else:
        second.broken = True
        second.state = EngineState.STOPPED
    catalogue.changes.notify()
    await lifecycle.startup_done.wait()
    assert lifecycle.hopeless is not reloaded
    await lifecycle.cancel_start()
