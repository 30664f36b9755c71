"""A node of a Ray cluster as the place of an engine."""

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from engines.guard import directories
from engines.guard.guardian_client import LaunchError
from engines.http import Address, Http1Client
from engines.logs import EngineLogger
from engines.process import EngineProcesses, HostUnavailable, Launch
from engines.ray import protocol
from engines.ray.cluster import Cluster
from engines.ray.joined import JoinedProcesses, MergedLog
from engines.ray.placement import needed_resources, occupied, placement_fault
from engines.ray.processes import RayProcesses, remove_place
from engines.ray.protocol import ClusterError, EngineOwned, EngineRefused, Hello, Plan, Result
from engines.ray.ranks import actor_name
from engines.spec import RaySpec, RayTls

log = logging.getLogger(__name__)

# For an engine that is to be stopped to be found.
FIND_S = 10.0
# For the cluster to give an engine a place that a node has.
PLACE_S = 30.0
PLACE_POLL_S = 1.0
# An actor that no gateway has called for so long has none; every call of `watch` counts.
LEASE_S = 30.0
# The log of an engine here is a copy, with the guardian's bound.
MAX_LOG_BYTES = 16 * 1024 * 1024


async def _unless_stopped(
    call: Coroutine[Any, Any, Result], stopping: Callable[[], bool], grace_s: float
) -> Result:
    """Return what a call returns; give it up `grace_s` after a stop. Raises ClusterError."""
    calling = asyncio.ensure_future(call)
    try:
        while not calling.done() and not stopping():
            await asyncio.wait({calling}, timeout=PLACE_POLL_S)
        await asyncio.wait({calling}, timeout=grace_s)
        if not calling.done():
            raise ClusterError("stopped while it waited for the Ray cluster")
        return calling.result()
    finally:
        calling.cancel()


class RayHost:
    """The place of one engine in a Ray cluster. See `EngineHost`."""

    def __init__(
        self,
        launch: Launch,
        cluster: Cluster,
        clients: Sequence[Http1Client],
        *,
        launcher: Sequence[str] | None,
        tls: RayTls | None = None,
    ) -> None:
        """`clients` are directed to the engine when its address is known.

        `launcher` runs vLLM's server; default: the vLLM of the node.
        """
        assert isinstance(launch.spec, RaySpec)
        self._launch = launch
        self._logger = EngineLogger(log, launch.name)
        self._spec = launch.spec
        self._cluster = cluster
        self._clients = clients
        self._launcher = launcher
        self._tls = tls
        self._context = None if tls is None else tls.context()
        self._processes: RayProcesses | JoinedProcesses | None = None
        # The names of its actors.
        self._actors: list[str] = []
        self._nodes: list[str] = []

    @property
    def listening(self) -> bool:
        """True when the actor has connected to the engine's server."""
        return self._processes is not None and self._processes.listens

    @property
    def where(self) -> str:
        """The addresses of the engine's nodes, as far as they are known."""
        return ", ".join(self._nodes)

    async def find(self, stopping: Callable[[], bool]) -> EngineProcesses | None:
        """Return the engine of this name in the cluster, of this gateway or of a silent one."""
        self._processes = None
        cluster, name = self._cluster, self._launch.name
        cluster.join(name)
        try:
            claim = protocol.Claim(name=name, owner=cluster.owner, owner_name=cluster.owner_name)
            found = await _unless_stopped(cluster.call(claim), stopping, FIND_S)
        except EngineOwned as error:
            raise HostUnavailable(
                f"an engine of this name in the namespace {cluster.namespace} of the Ray cluster "
                f"belongs to the gateway {error}: set another ray.namespace"
            ) from None
        except ClusterError as error:
            cluster.abandon(name)
            raise HostUnavailable(str(error)) from None
        cluster.clear(name)
        if not found:
            return None
        try:
            self._begin_log()
        except (OSError, LaunchError) as error:
            raise HostUnavailable(str(error)) from None
        return self._connected(found)

    async def start(self, stopping: Callable[[], bool]) -> EngineProcesses:
        """Start the engine where the cluster has room. Raises as `EngineHost.start`."""
        launch, cluster = self._launch, self._cluster
        self._begin_log()
        needed = needed_resources(self._spec)
        place = f"{launch.name}.{cluster.owner[:16]}.{secrets.token_hex(8)}"
        try:
            await self._find_place(place, needed, stopping)
            ranks = await self._start(place, needed, stopping)
        except ClusterError as error:
            await remove_place(cluster, launch.name, place)
            if isinstance(error, EngineRefused):
                raise LaunchError(str(error)) from None
            raise HostUnavailable(str(error)) from None
        return self._connected(ranks)

    async def used_gib(self, processes: EngineProcesses) -> float | None:
        """Return the GiB that the engine uses on its nodes; None: not known."""
        with contextlib.suppress(ClusterError):
            calls = (self._cluster.call(protocol.UsedGib(name=actor)) for actor in self._actors)
            found: list[float | None] = await asyncio.gather(*calls)
            return None if None in found else sum(filter(None, found))
        return None

    async def wait_until_released(self, processes: EngineProcesses) -> None:
        """Return at once: the actor reports an end only when the memory is released."""

    def _begin_log(self) -> None:
        """Begin a new copy of the engine's log. Raises OSError and LaunchError."""
        try:
            directories.make_private(self._launch.directory)
        except directories.ForeignDirectory as error:
            raise LaunchError(str(error)) from None
        self._launch.set_log_aside()

    async def _find_place(
        self, place: str, needed: dict[str, float], stopping: Callable[[], bool]
    ) -> None:
        """Return when the cluster has a place. Raises ClusterError, also on a stop."""
        loop, cluster = asyncio.get_running_loop(), self._cluster
        count = self._spec.nodes
        if fault := placement_fault(needed, await cluster.nodes(), count):
            raise ClusterError(fault)
        await cluster.call(protocol.Reserve(place=place, needed=needed, nodes=count))
        deadline = loop.time() + PLACE_S
        while not await cluster.call(protocol.IsReserved(place=place, wait_s=PLACE_POLL_S)):
            if stopping():
                raise ClusterError("stopped while it waited for a place in the Ray cluster")
            if loop.time() >= deadline:
                nodes = await cluster.nodes()
                asked = needed, nodes, count
                raise ClusterError(placement_fault(*asked) or occupied(*asked))

    async def _start(
        self, place: str, needed: dict[str, float], stopping: Callable[[], bool]
    ) -> list[Hello]:
        """Start an actor with the engine; return how to reach its ranks. Raises ClusterError."""
        call = protocol.Start(place=place, needed=needed, nodes=self._spec.nodes, plan=self._plan())
        # The actor ends with its place.
        return await _unless_stopped(self._cluster.call(call), stopping, 0.0)

    def _plan(self) -> Plan:
        """Return what the actor starts."""
        launch, cluster = self._launch, self._cluster
        return Plan(
            owner=cluster.owner,
            owner_name=cluster.owner_name,
            namespace=cluster.namespace,
            name=launch.name,
            fingerprint=launch.fingerprint,
            lease_s=LEASE_S,
            launcher=None if self._launcher is None else tuple(self._launcher),
            arguments=tuple(launch.command),
            env=launch.own_env,
            inherit=tuple(self._spec.inherit_env),
            withheld=tuple(sorted(launch.withheld)),
            gpus=self._spec.gpus is not None,
            model_path=self._spec.model_path,
            files=(self._tls.cert_file, self._tls.key_file) if self._tls else (),
        )

    def _connected(self, ranks: Sequence[Hello]) -> EngineProcesses:
        """Direct requests to the engine; return its processes."""
        serving = ranks[0]
        address = Address(serving.host, serving.port or 0, tls=self._tls is not None)
        for client in self._clients:
            key = ("authorization", f"Bearer {serving.key}")
            client.direct_to(address, (key,), self._context)
        self._processes = processes = self._processes_of(ranks)
        where = (processes.address, processes.engine_pid, processes.elsewhere)
        self._logger.info("runs on %s, pid %d there%s", *where)
        for rank in ranks:
            if rank.nice > 0:
                self._logger.warning(
                    "runs on %s with nice %d, so that other programs there slow it down: "
                    "start Ray on that node with RAY_worker_niceness=0",
                    rank.host,
                    rank.nice,
                )
        return processes

    def _processes_of(self, hellos: Sequence[Hello]) -> RayProcesses | JoinedProcesses:
        """Return the processes of an engine, from what the actor of each rank says."""
        launch, cluster = self._launch, self._cluster
        self._actors = [actor_name(launch.name, rank) for rank in range(len(hellos))]
        self._nodes = [hello.host for hello in hellos]
        write = functools.partial(_append, launch.log)
        if len(hellos) == 1:
            return RayProcesses(launch, cluster, hellos[0], write)
        merged = MergedLog(write, [(hello.pid, hello.host) for hello in hellos])

        async def give_back() -> None:
            merged.flush()
            await remove_place(cluster, launch.name, hellos[0].place)

        ranks = [
            RayProcesses(launch, cluster, hello, functools.partial(merged.add, rank))
            for rank, hello in enumerate(hellos)
        ]
        return JoinedProcesses(ranks, give_back)


def _append(path: Path, text: str) -> None:
    """Append to the copy of a log. A full disk does not stop the engine."""
    if not text:
        return
    with contextlib.suppress(OSError):
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
        with path.open("a", encoding="utf-8") as file:
            path.chmod(0o600)
            file.write(text)
