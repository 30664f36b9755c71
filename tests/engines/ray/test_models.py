"""Models whose engines are in a Ray cluster, behind the gateway: loaded on demand, and scaled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.scaling import policy
from engines.base import EngineState
from tests.engines.ray.clusters import LAUNCHER, SLOT, Nodes
from tests.gateway import Gateway, running, settings_for
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
START_S = 60.0


@asynccontextmanager
async def gateway(nodes: Nodes, run_dir: Path, **model: Any) -> AsyncIterator[Gateway]:
    """Run a gateway with a model in the cluster, whose engines are fakes."""
    engine = {"kind": "ray", "model": "m", "resources": {SLOT: 1}, **model.pop("engine", {})}
    settings = settings_for(
        {"name": "demo", "engines": [engine], **model},
        run_dir=run_dir,
        ray={"address": nodes.address, "namespace": run_dir.name},
    )
    async with running(settings, LAUNCHER) as one:
        yield one


def states(gateway: Gateway) -> list[EngineState]:
    return [one.engine.state for one in gateway.state.catalogue.resolve("demo").replicas]


async def test_a_model_on_demand_takes_a_place_only_while_it_is_loaded(
    nodes: Nodes, tmp_path: Path
) -> None:
    async with gateway(nodes, tmp_path, load="on_demand") as one:
        one.client.timeout = START_S
        assert states(one) == [EngineState.STOPPED]
        assert (await one.chat()).status_code == 200
        assert states(one) == [EngineState.READY]
        await one.state.loader.unload("demo")
        assert states(one) == [EngineState.STOPPED]
        # The slots of both nodes are free again.
        both = {"replicas": 2}
        async with gateway(nodes, tmp_path / "second", engine=both) as other:
            await wait_until(lambda: states(other) == [EngineState.READY] * 2, START_S)


async def test_a_queue_brings_a_second_engine_which_leaves_when_it_is_over(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.scaling.autoscaler.INTERVAL_S", 0.2)
    monkeypatch.setattr(policy, "UP_S", 0.5)
    monkeypatch.setattr(policy, "DOWN_S", 1.0)
    monkeypatch.setattr(policy, "DOWN_STARTS", 0.0)
    scaled = {"replicas": {"min": 1, "max": 2, "target_wait_s": 0.1}}
    queue = {"max_in_flight": 1}
    async with gateway(nodes, tmp_path, engine=scaled, queue=queue) as one:
        one.client.timeout = START_S
        assert states(one) == [EngineState.READY]

        async def keep_asking() -> list[int]:
            statuses: list[int] = []
            while states(one) != [EngineState.READY] * 2:
                statuses.append((await one.chat(fake="tokens:60:5", stream=True)).status_code)
            return statuses

        answers = await asyncio.gather(*(keep_asking() for _ in range(6)))
        assert {status for found in answers for status in found} == {200}
        await wait_until(lambda: states(one) == [EngineState.READY], START_S)
        assert (await one.chat()).status_code == 200
