"""Clusters that a test damages or slows down, so that no other can use them."""

import asyncio
import os
from pathlib import Path

import pytest

from engines.base import EngineState
from engines.ray import Cluster, ClusterError, host, protocol
from tests.engines.processes import gone
from tests.engines.ray.clusters import ask, build, connectors, family, ray_nodes, ready
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

S = EngineState


async def test_engine_outlives_the_head_for_a_while_and_fails_with_its_node(
    tmp_path: Path,
) -> None:
    # Ray's processes end so long after the head; a minute by default.
    with ray_nodes(gcs_rpc_server_reconnect_timeout_s="15") as nodes:
        nodes.add()
        cluster = Cluster(nodes.address, "test", tmp_path / "gateway")
        engine = build(cluster, tmp_path)
        await ready(engine)
        processes = family(engine.pid)
        await asyncio.to_thread(nodes.remove_head)
        assert await ask(engine) == 200
        assert engine.state is S.READY
        await asyncio.to_thread(nodes.remove_of, engine.pid)
        await wait_until(lambda: engine.state is S.FAILED, timeout_s=60)
        assert await wait_until(lambda: "no Ray at" in (engine.last_error or ""), timeout_s=100)
        assert gone(processes)
        await engine.stop(0.0)
        await cluster.close()


async def test_engine_can_be_watched_and_stopped_while_the_head_is_away(tmp_path: Path) -> None:
    with ray_nodes() as nodes:
        nodes.add()
        cluster = Cluster(nodes.address, "test", tmp_path / "gateway")
        engine = build(cluster, tmp_path)
        await ready(engine)
        processes, before = family(engine.pid), connectors()
        await asyncio.to_thread(nodes.remove_head)
        used_s = before[0].cpu_times().user
        with pytest.raises(ClusterError, match="no answer"):
            await cluster.call(protocol.ListNodes(), 8.0)
        assert connectors() == before
        assert before[0].cpu_times().user - used_s < 1.0  # it waits, and does not spin
        assert engine.state is S.READY
        async with asyncio.timeout(40):  # of which the head is given eight to take the place back
            await engine.stop(0.0)
        assert str(engine.state) == "stopped"
        await wait_until(lambda: gone(processes))
        await cluster.close()


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
        cluster = Cluster(nodes.address, "test", tmp_path / "gateway")
        engine = build(cluster, tmp_path, nodes=2, args={"tensor-parallel-size": 2})
        try:
            await ready(engine)
            assert engine.restarts == 0
        finally:
            await engine.stop(0.0)
            await cluster.close()
