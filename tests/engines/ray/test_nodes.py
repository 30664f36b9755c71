"""Engines over several nodes of a real Ray cluster, with fake vLLM servers as their ranks."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from engines.base import EngineState
from engines.ray import Cluster, RayEngine, host
from engines.ray.actor import _directory
from engines.ray.ranks import actor_name
from tests.engines.processes import gone
from tests.engines.ray.clusters import (
    PATIENCE_S,
    SLOT,
    Nodes,
    ask,
    build,
    connected,
    fault_of,
    ready,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

S = EngineState
NAMESPACE = "several-nodes"
Connect = Callable[[], Cluster]
Make = Callable[..., RayEngine]
FindRank = Callable[..., list[psutil.Process]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the gateway."""
    return tmp_path_factory.mktemp("home")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first(nodes: Nodes, home: Path) -> AsyncIterator[Cluster]:
    """The connection of the gateway, which stays open between tests."""
    async with connected(Cluster(nodes.address, NAMESPACE, home / "gateway")) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def connect(nodes: Nodes, home: Path) -> AsyncIterator[Connect]:
    """Connect to the cluster as the next process of the gateway."""
    made: list[Cluster] = []

    def cluster() -> Cluster:
        made.append(Cluster(nodes.address, NAMESPACE, home / "gateway"))
        return made[-1]

    yield cluster
    for one in made:
        await one.close()


@pytest_asyncio.fixture(loop_scope="module")
async def make(connect: Connect, first: Cluster, tmp_path: Path) -> AsyncIterator[Make]:
    """Make engines over two nodes; they are stopped at the end,
    before their connections are closed.
    """
    made: list[RayEngine] = []

    def engine(cluster: Cluster = first, **fields: Any) -> RayEngine:
        args = {"tensor-parallel-size": 2, **fields.pop("args", {})}
        made.append(build(cluster, tmp_path, **{"nodes": 2, "args": args, **fields}))
        return made[-1]

    yield engine
    await asyncio.gather(*(one.stop(0.0) for one in made))


def find_rank(run_dir: Path, number: int, engine: str = "demo-0") -> list[psutil.Process]:
    """Return a rank of the gateway in a directory: guardian, vLLM and what that has started."""
    owner = (run_dir / "gateway" / "ray-owner").read_text()
    directory = _directory(owner, NAMESPACE, actor_name(engine, number)).name
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if directory in [Path(word).name for word in words[2:6]]:
            return [process, *process.children(recursive=True)]
    raise AssertionError(f"rank {number} does not run")


@pytest.fixture
def rank(home: Path) -> FindRank:
    """Find a rank of the gateway."""
    return functools.partial(find_rank, home)


def raylet(processes: list[psutil.Process]) -> int:
    return processes[0].parents()[1].pid


@pytest.fixture(scope="class")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def engine(nodes: Nodes, run_dir: Path) -> AsyncIterator[RayEngine]:
    cluster = Cluster(nodes.address, NAMESPACE, run_dir / "gateway")
    args = {"tensor-parallel-size": 2, "fake-children": True}
    restart = {"budget": 9, "backoff_s": 0.1, "max_backoff_s": 0.5}
    engine = build(cluster, run_dir, nodes=2, args=args, restart=restart)
    await ready(engine)
    yield engine
    await engine.stop(0.0)
    await cluster.close()


@pytest.mark.asyncio(loop_scope="class")
class TestOneEngine:
    """One engine, which every test leaves serving; the last one stops it."""

    @pytest.fixture
    def rank(self, run_dir: Path) -> FindRank:
        return functools.partial(find_rank, run_dir)

    async def test_ranks_start_on_different_nodes(
        self, rank: FindRank, engine: RayEngine, run_dir: Path
    ) -> None:
        assert await ask(engine) == 200
        first, second = rank(0), rank(1)
        assert first[1].pid == engine.pid
        assert raylet(first) != raylet(second)
        leading, following = first[1].cmdline(), second[1].cmdline()
        variables = second[1].environ()
        meeting = [word for word in leading if word.startswith("--master-")]
        assert meeting[0] == f"--master-addr={variables['VLLM_HOST_IP']}"
        for words, number in ((leading, 0), (following, 1)):
            assert {*meeting, "--nnodes=2", f"--node-rank={number}"} <= set(words)
            assert "--distributed-executor-backend=mp" in words
        assert "--headless" in following
        assert "--headless" not in leading
        assert not [word for word in following if word.startswith(("--host=", "--port="))]
        assert "VLLM_API_KEY" not in variables
        assert not [name for name in variables if name.startswith("RAY_")]
        assert variables["GLOO_SOCKET_IFNAME"] == first[1].environ()["GLOO_SOCKET_IFNAME"]
        node = variables["VLLM_HOST_IP"]
        log = run_dir / "demo-0" / "engine.log"
        first_words = "(APIServer pid=1) INFO", f"(Worker_TP1 pid=1, ip={node}) INFO"

        def merged() -> bool:
            lines = log.read_text().splitlines()
            return all(any(line.startswith(words) for line in lines) for words in first_words)

        await wait_until(merged)

    @pytest.mark.parametrize("killed", [0, 1])
    async def test_end_of_a_rank_ends_and_restarts_the_engine(
        self, rank: FindRank, engine: RayEngine, killed: int
    ) -> None:
        before = [*rank(0), *rank(1)]
        await self._restarts(engine, rank(killed)[1])
        assert gone(before)
        assert "died while serving on node " in (engine.last_error or "")

    async def test_end_of_an_actor_ends_and_restarts_the_engine(
        self, rank: FindRank, engine: RayEngine
    ) -> None:
        before = [*rank(0), *rank(1)]
        actor = rank(1)[0].parent()
        assert actor is not None
        await self._restarts(engine, actor)
        assert gone(before)
        assert "or its actor there is lost" in (engine.last_error or "")

    async def test_ranks_stop_together(self, rank: FindRank, engine: RayEngine) -> None:
        processes = [*rank(0), *rank(1)]
        await engine.stop(5.0)
        assert engine.state is S.STOPPED
        assert gone(processes)

    async def _restarts(self, engine: RayEngine, killed: psutil.Process) -> None:
        """Kill a process; return when the engine serves again."""
        expected = engine.restarts + 1
        killed.kill()
        await wait_until(
            lambda: engine.restarts == expected and engine.state is S.READY, timeout_s=PATIENCE_S
        )
        assert await ask(engine) == 200


async def test_rank_that_fails_in_its_start_is_named_by_its_node(make: Make) -> None:
    engine = make(args={"fake-headless-crash": True}, restart={"budget": 0})
    fault = await fault_of(engine)
    assert "no room for KV cache (node " in fault


async def test_node_is_lost_under_load_and_the_engine_starts_when_one_is_back(
    rank: FindRank, nodes: Nodes, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PLACE_S", 8.0)
    engine = make()
    await ready(engine)
    before = [*rank(0), *rank(1)]

    async def keep_asking() -> None:
        while engine.state is S.READY:
            try:
                await ask(engine)
            except Exception:  # noqa: BLE001 - the engine is being lost
                await asyncio.sleep(0.01)

    asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
    await asyncio.to_thread(nodes.remove_of, rank(1)[1].pid)
    await wait_until(lambda: engine.state is S.FAILED, timeout_s=30)
    await asyncio.gather(*asking)
    await wait_until(lambda: gone(before), timeout_s=10)
    await wait_until(
        lambda: "only 1 node of the Ray cluster can hold a part" in (engine.last_error or ""),
        timeout_s=60,
    )
    nodes.add()
    await wait_until(lambda: engine.state is S.READY, timeout_s=PATIENCE_S)
    assert await ask(engine) == 200


async def test_engine_is_adopted_whole_or_not_at_all(
    rank: FindRank, make: Make, connect: Connect
) -> None:
    engine = make(keep=True)
    await ready(engine)

    async def next_gateway(**fields: Any) -> RayEngine:
        await engine.release()
        following = make(connect(), keep=True, **fields)
        await ready(following)
        return following

    before = [*rank(0), *rank(1)]
    engine = await next_gateway()
    assert [*rank(0), *rank(1)] == before
    assert await ask(engine) == 200
    for lost in (0, 1):
        before = [*rank(0), *rank(1)]
        actor = rank(lost)[0].parent()
        assert actor is not None
        await engine.release()
        actor.kill()
        engine = await next_gateway()
        assert engine.restarts == 0
        assert gone(before)
        assert await ask(engine) == 200
    # Another number of nodes is another engine.
    before = [*rank(0), *rank(1)]
    await next_gateway(nodes=1)
    assert gone(before)


async def test_kept_engine_that_lost_a_rank_ends_without_a_gateway(
    rank: FindRank, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "LEASE_S", 3.0)
    left = make(keep=True)
    await ready(left)
    before = [*rank(0), *rank(1)]
    await left.release()
    rank(1)[1].kill()
    await wait_until(lambda: gone(before), timeout_s=30)


async def test_engine_that_is_no_longer_configured_is_stopped_on_every_node(
    rank: FindRank, make: Make, connect: Connect
) -> None:
    left = make(name="old-0", keep=True)
    await ready(left)
    before = [*rank(0, "old-0"), *rank(1, "old-0")]
    await left.release()
    engine = make(connect(), name="new-0")
    await ready(engine)
    assert gone(before)


async def test_place_that_the_cluster_does_not_have_is_one_line(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PLACE_S", 1.0)
    never = make(nodes=3, args={"tensor-parallel-size": 3})
    assert (
        "only 2 nodes of the Ray cluster can hold a part of it: it needs 3 nodes with CPU 1, "
        f"{SLOT} 1 each; there is "
    ) in await fault_of(never)
    other = make(name="other-0", nodes=1)
    await ready(other)
    fault = await fault_of(make())
    assert "only 1 node of the Ray cluster has room for a part of it now: it needs 2 no" in fault
