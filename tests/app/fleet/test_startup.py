"""EngineLifecycle: when the start of the engines has settled."""

import asyncio
from pathlib import Path
from typing import cast

from app.fleet import EngineLifecycle
from app.residency import OnDemandLoader
from app.routing import Catalogue, Model, Replica
from app.telemetry.metrics import Metrics
from engines.base import EngineNotReady, EngineState
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
    lifecycle = EngineLifecycle(catalogue, loader, Metrics(), tmp_path, lambda: False)
    lifecycle.start()
    await run_pending_tasks()
    assert not lifecycle.startup_done.is_set()
    engine.state = EngineState.STOPPED
    engine.ended.set()
    async with asyncio.timeout(PATIENCE_S):
        await lifecycle.startup_done.wait()
    await lifecycle.cancel_start()
