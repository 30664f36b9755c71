"""What strangers and dead connectors leave in a real Ray cluster."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from engines.ray import Cluster, protocol
from tests.engines.ray.clusters import Nodes, build, connectors

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
    [connector] = connectors()
    connector.kill()
    await first.close()
    second = Cluster(nodes.address, "strangers", tmp_path / "gateway")
    engine = build(second, tmp_path)
    await engine.ensure_ready(asyncio.get_running_loop().time() + START_S)
    assert await second.call(engines) == ["demo-0"]
    await engine.stop(0.0)
    await second.close()
