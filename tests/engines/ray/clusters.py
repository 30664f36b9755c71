"""Real Ray clusters on this machine, and engines on them."""

import asyncio
import contextlib
import os
import secrets
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.base import EngineNotReady
from engines.ray import Cluster, RayEngine
from engines.setup import EngineSetup
from engines.spec import RaySpec, RayTls
from tests.engines.processes import chat, read

LAUNCHER = (sys.executable, "-m", "tests.fakes.vllm")
PATIENCE_S = 90.0
SETUP_WORKER = Path(__file__).with_name("setup_worker.py")
AGENT_PORTS = {
    "dashboard_agent": ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"),
    "runtime_env_agent": ("runtime_env_agent_port",),
}
NO_AGENT = 'setpriv --pdeathsig=KILL sh -c "exec sleep infinity"'
STORE_BYTES = 80 * 1024 * 1024
# An engine takes one, so that a node holds as many engines as it has slots.
SLOT = "slot"
# Ray reads it once in a process.
TOKEN = secrets.token_hex(32)
# Ray reports nothing to its makers and keeps no metrics. It declares a node dead after five failed
# health checks: 2.5 s here, 15 s by default. It starts no workers in advance: those of engines have
# variables of their own.
SETTINGS = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_health_check_period_ms": "500",
}


class Nodes:
    """A running cluster of a head without slots; every other node has one."""

    def __init__(self) -> None:
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")
            from ray._private.node import Node
            from ray.cluster_utils import Cluster as RayNodes

            # The gateway uses none of them: the dashboard's server, which Ray starts even without
            # a dashboard, the autoscaler and what collects logs take 3 s of CPU to start.
            patch.setattr(Node, "start_api_server", lambda *_, **__: None)
            # Without CPUs, Ray starts no workers there in advance.
            head = {**_size(slots=0), "num_cpus": 0, "no_monitor": True}
            self._cluster = RayNodes(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address

    def add(self, slots: int = 1) -> Any:
        """Start a node; return it."""
        return self._cluster.add_node(**_size(slots))

    def of(self, pid: int | None) -> Any:
        """Return the node of a process."""
        ancestors = {process.pid for process in psutil.Process(pid).parents()}
        for node in self._cluster.list_all_nodes():
            if node.all_processes["raylet"][0].process.pid in ancestors:
                return node
        raise AssertionError(f"no node has the process {pid}")

    def remove_of(self, pid: int | None) -> None:
        """End the node of a process, without a warning."""
        self._cluster.remove_node(self.of(pid), allow_graceful=False)

    def remove_head(self) -> None:
        """End the head, without a warning."""
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)

    def close(self) -> None:
        """End every node."""
        self._cluster.shutdown()


def _size(slots: int) -> dict[str, Any]:
    return {
        "num_cpus": 2,
        "resources": {SLOT: slots} if slots else {},
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
        "include_log_monitor": False,
        "setup_worker_path": str(SETUP_WORKER),
    }


def _without_agents(start: Callable[..., Any]) -> Callable[..., Any]:
    """Start Ray's processes, but no agents that no test needs: 1 s of CPU each.

    Those of the dashboard, and on the head, which has no workers, that of their environments.
    Raylets need processes in their place, and their ports: -1, as of agents that serve nothing.
    """

    def started(command: list[str], *options: Any, **named: Any) -> Any:
        flags = dict(word.split("=", 1) for word in command if "=" in word)
        if "--dashboard_agent_command" in flags:  # a raylet
            for agent in AGENT_PORTS if "--head" in command else ("dashboard_agent",):
                command = [*command, f"--{agent}_command={NO_AGENT}"]
                for port in AGENT_PORTS[agent]:
                    file = Path(flags["--session_dir"], f"{port}_{flags['--node_id']}")
                    file.write_text("-1")
        return start(command, *options, **named)

    return started


@contextlib.contextmanager
def ray_nodes(**settings: str) -> Iterator[Nodes]:
    """Run a cluster whose processes authenticate each other; `settings` are Ray's, without RAY_."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        more = {f"RAY_{name}": value for name, value in settings.items()}
        for name, value in {**SETTINGS, **more}.items():
            patch.setenv(name, value)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        from ray._private import services  # reads the variables

        start = _without_agents(services.start_ray_process)
        patch.setattr(services, "start_ray_process", start)
        nodes = Nodes()
        try:
            yield nodes
        finally:
            nodes.close()


def build(
    cluster: Cluster,
    run_dir: Path,
    *,
    name: str = "demo-0",
    keep: bool = False,
    launcher: tuple[str, ...] | None = LAUNCHER,
    tls: RayTls | None = None,
    lora: bool = False,
    **fields: Any,
) -> RayEngine:
    """Return an engine that is not started. The caller stops it."""
    restart = {"budget": 3, "backoff_s": 0.1, "max_backoff_s": 0.5}
    spec = RaySpec.model_validate(
        {"kind": "ray", "model": "m", "restart": restart, "resources": {SLOT: 1}} | fields
    )
    setup = EngineSetup(name=name, served_name="demo", run_dir=run_dir, keep=keep, lora=lora)
    return RayEngine(setup, spec, cluster, launcher=launcher, tls=tls)


def family(pid: int | None) -> list[psutil.Process]:
    """Return every process of an engine with this server, the guardian first."""
    guardian = psutil.Process(pid).parent()
    assert guardian is not None
    return [guardian, *guardian.children(recursive=True)]


@contextlib.asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[Cluster]:
    """Keep a connection open when no engine uses it; a connector takes a second of CPU to start."""
    cluster.join("tests")
    yield cluster
    await cluster.close()


async def ready(engine: RayEngine) -> None:
    await engine.ensure_ready(asyncio.get_running_loop().time() + PATIENCE_S)


async def ask(engine: RayEngine, **body: Any) -> int:
    response = await engine.send(chat(**body))
    await read(response)
    return response.status


async def fault_of(engine: RayEngine) -> str:
    """Return why an engine does not start."""
    with pytest.raises(EngineNotReady) as raised:
        await ready(engine)
    await engine.stop(0.0)
    return str(raised.value)


def connectors() -> list[psutil.Process]:
    """Return the connectors of this process that run."""
    alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in alive if "engines.ray.connector" in one.cmdline()]
