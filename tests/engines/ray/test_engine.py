"""Engines on a real Ray cluster of two nodes, with fake vLLM servers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from engines.base import EngineNotReady, EngineState
from engines.ray import Cluster, RayEngine, host
from tests.engines.processes import gone
from tests.engines.ray.clusters import (
    SLOT,
    Nodes,
    ask,
    build,
    connected,
    connectors,
    family,
    fault_of,
    ready,
)
from tests.fakes.adapter_routes import write_adapter
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

S = EngineState
Connect = Callable[..., Cluster]
Make = Callable[..., RayEngine]


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directories of gateways."""
    return tmp_path_factory.mktemp("gateways")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first(nodes: Nodes, gateways: Path) -> AsyncIterator[Cluster]:
    """The connection of the first gateway, which stays open between tests."""
    async with connected(Cluster(nodes.address, "test", gateways / "gateway")) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def connect(nodes: Nodes, gateways: Path) -> AsyncIterator[Connect]:
    """Connect gateways to the cluster; each directory is another gateway's."""
    made: list[Cluster] = []

    def cluster(gateway: str = "gateway", address: str | None = None) -> Cluster:
        made.append(Cluster(address or nodes.address, "test", gateways / gateway))
        return made[-1]

    yield cluster
    for one in made:
        await one.close()


@pytest_asyncio.fixture(loop_scope="module")
async def make(connect: Connect, first: Cluster, tmp_path: Path) -> AsyncIterator[Make]:
    """Make engines, by default of the first gateway; they are stopped at the end,
    before their connections are closed.
    """
    made: list[RayEngine] = []

    def engine(cluster: Cluster = first, run_dir: Path = tmp_path, **fields: Any) -> RayEngine:
        made.append(build(cluster, run_dir, **fields))
        return made[-1]

    yield engine
    await asyncio.gather(*(one.stop(0.0) for one in made))


@pytest.fixture(scope="class")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="class")
def legal(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of an adapter."""
    return str(write_adapter(tmp_path_factory.mktemp("adapters") / "legal"))


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def engine(nodes: Nodes, run_dir: Path, legal: str) -> AsyncIterator[RayEngine]:
    cluster = Cluster(nodes.address, "test", run_dir / "gateway")
    engine = build(cluster, run_dir, lora=True, args={"fake-children": True})
    engine.want_adapters({"legal": legal})
    await ready(engine)
    yield engine
    await engine.stop(0.0)
    await cluster.close()


@pytest.mark.asyncio(loop_scope="class")
class TestOneEngine:
    """One engine, which every test leaves serving; the last one stops it."""

    async def test_serves_with_a_key_of_its_own(self, engine: RayEngine, run_dir: Path) -> None:
        assert await ask(engine) == 200
        processes = family(engine.pid)
        variables = processes[1].environ()
        arguments = " ".join(word for one in processes for word in one.cmdline())
        assert len(variables["VLLM_API_KEY"]) >= 32
        assert variables["VLLM_API_KEY"] not in arguments
        assert variables["VLLM_HOST_IP"] in arguments
        assert not [name for name in variables if name.startswith("RAY_")]
        assert "OMP_NUM_THREADS" not in variables
        assert "ray" not in variables.get("LD_PRELOAD", "")
        assert {process.nice() for process in processes} == {psutil.Process().nice()}
        server = dict(word.split("=", 1) for word in processes[1].cmdline() if "=" in word)
        async with httpx.AsyncClient() as anyone:
            for path in ("health", "metrics", "version", "v1/models"):
                url = f"http://{server['--host']}:{server['--port']}/{path}"
                assert (await anyone.get(url)).status_code == 401
        assert any("API server" in line for line in engine.recent_log())
        assert (run_dir / "demo-0" / "engine.log").stat().st_mode & 0o077 == 0

    async def test_serves_on_when_the_connector_is_killed(self, engine: RayEngine) -> None:
        pid = engine.pid
        [connector] = connectors()
        connector.kill()
        assert await ask(engine) == 200
        await wait_until(lambda: connectors() not in ([], [connector]), timeout_s=30)
        assert (engine.state, engine.pid) == (S.READY, pid)

    async def test_killed_server_is_restarted_with_its_adapters(
        self, engine: RayEngine, legal: str
    ) -> None:
        assert engine.has_adapter("legal", legal)
        assert await ask(engine, model="legal") == 200
        processes = family(engine.pid)
        processes[1].kill()
        await wait_until(lambda: engine.restarts == 1 and engine.state is S.READY, timeout_s=60)
        assert gone(processes)
        assert "died while serving" in (engine.last_error or "")
        assert engine.has_adapter("legal", legal)
        assert await ask(engine, model="legal") == 200

    async def test_killed_actor_takes_its_engine_with_it(self, engine: RayEngine) -> None:
        processes = family(engine.pid)
        actor = processes[0].parent()
        assert actor is not None
        before = engine.restarts
        actor.kill()
        await wait_until(lambda: gone(processes), timeout_s=10)
        await wait_until(
            lambda: engine.restarts == before + 1 and engine.state is S.READY, timeout_s=60
        )

    async def test_stops_with_all_of_its_processes(self, engine: RayEngine) -> None:
        processes = family(engine.pid)
        await engine.stop(5.0)
        assert engine.state is S.STOPPED
        assert gone(processes)


async def test_node_is_lost_and_the_engine_starts_on_the_next(
    nodes: Nodes, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PLACE_S", 8.0)
    first, second = (make(name=f"demo-{n}") for n in range(2))
    await asyncio.gather(ready(first), ready(second))
    raylets = [psutil.Process(one.pid).parents()[2].pid for one in (first, second)]
    assert raylets[0] != raylets[1]
    processes = family(second.pid)
    await asyncio.to_thread(nodes.remove_of, second.pid)
    await wait_until(lambda: second.state is S.FAILED, timeout_s=30)
    assert second.last_error is not None
    await wait_until(lambda: gone(processes), timeout_s=10)
    assert first.state is S.READY
    assert await ask(first) == 200
    # The other node is full.
    await wait_until(lambda: "has room" in (second.last_error or ""), timeout_s=60)
    nodes.add()
    await wait_until(lambda: second.state is S.READY, timeout_s=60)
    assert await ask(second) == 200


async def test_engine_is_adopted_by_the_next_gateway(make: Make, connect: Connect) -> None:
    left = make(keep=True)
    await ready(left)
    pid = left.pid
    await left.release()
    adopting = make(connect(), keep=True)
    await ready(adopting)
    assert adopting.pid == pid
    assert await ask(adopting) == 200
    await adopting.release()
    changed = make(connect(), keep=True, args={"max-model-len": 4096})
    await ready(changed)
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert changed.pid != pid


async def test_engine_of_another_gateway_is_left_alone(
    make: Make, connect: Connect, tmp_path: Path
) -> None:
    owned = make(run_dir=tmp_path / "1")
    await ready(owned)
    other = make(connect("second"), tmp_path / "2")
    fault = await fault_of(other)
    assert "belongs to the gateway" in fault
    assert "ray.namespace" in fault
    assert await ask(owned) == 200


async def test_engine_that_is_no_longer_configured_is_stopped(make: Make, connect: Connect) -> None:
    left = make(name="old-0", keep=True)
    await ready(left)
    processes = family(left.pid)
    await left.release()
    engine = make(connect(), name="new-0")
    await ready(engine)
    assert gone(processes)


async def test_engine_ends_without_its_gateway_unless_it_is_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "LEASE_S", 3.0)
    engine = make()
    await ready(engine)
    processes = family(engine.pid)
    await engine.release()
    await wait_until(lambda: gone(processes), timeout_s=30)


async def test_faults_of_a_place_are_one_line(
    make: Make, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PLACE_S", 1.0)
    never = make(resources={SLOT: 2})
    assert "no node of the Ray cluster can hold it: it needs CPU 1, slot 2" in await fault_of(never)
    nowhere = make(connect(address="127.0.0.1:9"))
    assert await fault_of(nowhere) == "no Ray at 127.0.0.1:9: Connection refused"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    stranger = make(connect("stranger"))
    assert "did not accept the connection: give the gateway the token" in await fault_of(stranger)
    monkeypatch.undo()
    model = make(model="/no/such/model")
    assert (await fault_of(model)).startswith("model directory /no/such/model does not exist")


async def test_waiting_for_a_place_can_be_stopped(make: Make) -> None:
    both = [make(name=f"demo-{n}") for n in range(3)]
    await asyncio.gather(ready(both[0]), ready(both[1]))
    waiting = asyncio.create_task(ready(both[2]))
    await wait_until(lambda: both[2].state is S.STARTING)
    await both[2].stop(0.0)
    with pytest.raises(EngineNotReady):
        await waiting
