"""Engines over several nodes of a real Ray cluster, with fake vLLM servers as their ranks."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.base import EngineNotReady, EngineState
from engines.ray import Cluster, RayEngine, host
from engines.ray.actor import _directory
from engines.ray.ranks import actor_name
from tests.engines.processes import chat, gone, read
from tests.engines.ray.clusters import SLOT, Nodes, build, ray_nodes
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

S = EngineState
PATIENCE_S = 90.0
NAMESPACE = "several-nodes"
Connect = Callable[[], Cluster]
Make = Callable[..., RayEngine]
FindRank = Callable[..., list[psutil.Process]]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as running:
        running.add()
        running.add()
        yield running


@pytest.fixture
async def connect(nodes: Nodes, tmp_path: Path) -> AsyncIterator[Connect]:
    """Connect to the cluster as the next process of one gateway."""
    made: list[Cluster] = []

    def cluster() -> Cluster:
        made.append(Cluster(nodes.address, NAMESPACE, tmp_path / "gateway"))
        return made[-1]

    yield cluster
    for one in made:
        await one.close()


@pytest.fixture
async def make(connect: Connect, tmp_path: Path) -> AsyncIterator[Make]:
    """Make engines over two nodes; they are stopped at the end."""
    made: list[RayEngine] = []
    first = connect()

    def engine(cluster: Cluster = first, **fields: Any) -> RayEngine:
        args = {"tensor-parallel-size": 2, **fields.pop("args", {})}
        made.append(build(cluster, tmp_path, **{"nodes": 2, "args": args, **fields}))
        return made[-1]

    yield engine
    await asyncio.gather(*(one.stop(0.0) for one in made))


async def ready(engine: RayEngine) -> None:
    await engine.ensure_ready(asyncio.get_running_loop().time() + PATIENCE_S)


async def ask(engine: RayEngine) -> int:
    response = await engine.send(chat())
    await read(response)
    return response.status


async def fault_of(engine: RayEngine) -> str:
    """Return why an engine does not start."""
    with pytest.raises(EngineNotReady) as raised:
        await ready(engine)
    await engine.stop(0.0)
    return str(raised.value)


@pytest.fixture
def rank(tmp_path: Path) -> FindRank:
    """Find a rank of the test's gateway: its guardian, its vLLM and what that has started."""

    def find(number: int, engine: str = "demo-0") -> list[psutil.Process]:
        owner = (tmp_path / "gateway" / "ray-owner").read_text()
        directory = _directory(owner, NAMESPACE, actor_name(engine, number)).name
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if directory in [Path(word).name for word in words[2:6]]:
                return [process, *process.children(recursive=True)]
        raise AssertionError(f"rank {number} does not run")

    return find


def raylet(processes: list[psutil.Process]) -> int:
    return processes[0].parents()[1].pid


async def restarted(engine: RayEngine, count: int = 1) -> None:
    await wait_until(
        lambda: engine.restarts == count and engine.state is S.READY, timeout_s=PATIENCE_S
    )


async def test_ranks_start_on_different_nodes_and_stop_together(
    rank: FindRank, make: Make, tmp_path: Path
) -> None:
    engine = make()
    await ready(engine)
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
    log = tmp_path / "demo-0" / "engine.log"
    first_words = "(APIServer pid=1) INFO", f"(Worker_TP1 pid=1, ip={node}) INFO"

    def merged() -> bool:
        lines = log.read_text().splitlines()
        return all(any(line.startswith(words) for line in lines) for words in first_words)

    await wait_until(merged)
    await engine.stop(5.0)
    assert engine.state is S.STOPPED
    assert gone([*first, *second])


@pytest.mark.parametrize("killed", [0, 1])
async def test_end_of_a_rank_ends_and_restarts_the_engine(
    rank: FindRank, make: Make, killed: int
) -> None:
    engine = make(args={"fake-children": True})
    await ready(engine)
    before = [*rank(0), *rank(1)]
    rank(killed)[1].kill()
    await restarted(engine)
    assert gone(before)
    assert "died while serving on node " in (engine.last_error or "")
    assert await ask(engine) == 200


async def test_end_of_an_actor_ends_and_restarts_the_engine(rank: FindRank, make: Make) -> None:
    engine = make()
    await ready(engine)
    before = [*rank(0), *rank(1)]
    actor = rank(1)[0].parent()
    assert actor is not None
    actor.kill()
    await restarted(engine)
    assert gone(before)
    assert "or its actor there is lost" in (engine.last_error or "")


async def test_rank_that_fails_in_its_start_is_named_by_its_node(make: Make) -> None:
    engine = make(args={"fake-headless-crash": True}, restart={"budget": 0})
    fault = await fault_of(engine)
    assert "no room for KV cache (node " in fault


async def test_node_is_lost_under_load_and_the_engine_starts_when_one_is_back(
    rank: FindRank, nodes: Nodes, make: Make
) -> None:
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


async def test_whole_engine_is_adopted(rank: FindRank, make: Make, connect: Connect) -> None:
    left = make(keep=True)
    await ready(left)
    before = [process.pid for number in (0, 1) for process in rank(number)]
    await left.release()
    adopting = make(connect(), keep=True)
    await ready(adopting)
    assert [process.pid for number in (0, 1) for process in rank(number)] == before
    assert await ask(adopting) == 200
    await adopting.release()
    # Another number of nodes is another engine.
    alone = make(connect(), keep=True, nodes=1)
    await ready(alone)
    assert not set(before) & set(psutil.pids())


@pytest.mark.parametrize("lost", [0, 1])
async def test_half_an_engine_is_not_adopted(
    rank: FindRank, make: Make, connect: Connect, lost: int
) -> None:
    left = make(keep=True)
    await ready(left)
    before = [*rank(0), *rank(1)]
    await left.release()
    actor = rank(lost)[0].parent()
    assert actor is not None
    actor.kill()
    adopting = make(connect(), keep=True)
    await ready(adopting)
    assert adopting.restarts == 0
    assert gone(before)
    assert await ask(adopting) == 200


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


async def test_rank_waits_for_a_node_that_is_slower_than_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "LEASE_S", 3.0)
    site = tmp_path / "site"
    site.mkdir()
    # Python from a cold disk.
    (site / "sitecustomize.py").write_text(
        "import sys, time\n"
        "time.sleep(8 * any('default_worker.py' in word for word in sys.orig_argv))\n"
    )
    with ray_nodes() as nodes:
        nodes.add()
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
            nodes.add()
        cluster = Cluster(nodes.address, NAMESPACE, tmp_path / "gateway")
        engine = build(cluster, tmp_path, nodes=2, args={"tensor-parallel-size": 2})
        try:
            await ready(engine)
            assert engine.restarts == 0
        finally:
            await engine.stop(0.0)
            await cluster.close()
