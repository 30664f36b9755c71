"""Faults of a real Ray cluster: what strangers and dead connectors leave, a head that is away."""

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engines.base import EngineState
from engines.ray import Cluster, ClusterError, protocol
from tests.engines.processes import gone
from tests.engines.ray.clusters import Nodes, build, family, ray_nodes
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

START_S = 60.0
# Another program of the cluster, with a named actor in the gateway's namespace.
STRANGER = """
import ray, sys
ray.init(address=sys.argv[1], namespace="strangers", log_to_driver=False)

class Stranger:
    def ping(self):
        return 1

for name in ("stranger", "demo-0@blue"):
    one = ray.remote(Stranger).options(name=name, lifetime="detached", num_cpus=0).remote()
    ray.get(one.ping.remote())
"""


def connector() -> psutil.Process:
    alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    [found] = [child for child in alive if "engines.ray.connector" in child.cmdline()]
    return found


async def test_what_others_leave_in_the_namespace_stops_no_engine(
    nodes: Nodes, tmp_path: Path
) -> None:
    await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", STRANGER, nodes.address], check=True, timeout=START_S
    )
    first = Cluster(nodes.address, "strangers", tmp_path / "gateway")
    owner = first.owner
    place = f"old-0.{owner[:16]}.00"
    reserve = protocol.Reserve(place=place, needed={"CPU": 1.0, "slot": 1.0}, nodes=1)
    engines = protocol.ListEngines(owner=owner)
    await first.call(reserve)
    assert await first.call(engines) == ["old-0"]
    # A gateway that ends gives back the place in which it started nothing.
    await first.close()
    assert await first.call(engines) == []
    # A connector that is killed leaves it to the next gateway.
    await first.call(reserve)
    connector().kill()
    await first.close()
    second = Cluster(nodes.address, "strangers", tmp_path / "gateway")
    engine = build(second, tmp_path)
    await engine.ensure_ready(asyncio.get_running_loop().time() + START_S)
    assert await second.call(engines) == ["demo-0"]
    await engine.stop(0.0)
    await second.close()


async def test_engine_can_be_watched_and_stopped_while_the_head_is_away(tmp_path: Path) -> None:
    with ray_nodes() as nodes:
        nodes.add()
        cluster = Cluster(nodes.address, "test", tmp_path / "gateway")
        engine = build(cluster, tmp_path)
        await engine.ensure_ready(asyncio.get_running_loop().time() + START_S)
        processes, before = family(engine.pid), connector()
        await asyncio.to_thread(nodes.remove_head)
        with pytest.raises(ClusterError, match="no answer"):
            await cluster.call(protocol.ListNodes(), 8.0)
        assert connector() == before
        assert engine.state is EngineState.READY
        async with asyncio.timeout(40):  # of which the head is given eight to take the place back
            await engine.stop(0.0)
        assert str(engine.state) == "stopped"
        await wait_until(lambda: gone(processes))
        await cluster.close()
