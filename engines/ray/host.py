"""A node of a Ray cluster as the place of an engine; reports of the engine's actor there."""

import asyncio
import contextlib
import functools
import logging
import secrets
import signal
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.guard import directories
from engines.guard.guardian_client import LaunchError
from engines.guard.process_tree import ProcessStat
from engines.http import Address, Http1Client
from engines.process import EngineProcesses, HostUnavailable, Launch
from engines.ray.cluster import ActorDead, Cluster, ClusterError, EngineRefused
from engines.ray.joined import JoinedProcesses
from engines.ray.merged_log import MergedLog
from engines.ray.placement import needed_resources, occupied, placement_fault
from engines.ray.ranks import actor_name
from engines.spec import RaySpec, RayTls

log = logging.getLogger(__name__)

# For an engine that is to be stopped to be found.
FIND_S = 10.0
# For the cluster to give an engine a place that a node has.
PLACE_S = 30.0
PLACE_POLL_S = 1.0
# For an actor and the processes of the engine to start; see `engines.ray.connector`.
START_S = 200.0
KILL_S = 50.0
# For the head to take back a place; nothing waits for it.
GIVE_BACK_S = 8.0
# An actor that no gateway has called for so long has none; every call of `watch` counts.
LEASE_S = 30.0
WATCH_S = 4.0
WATCH_TIMEOUT_S = 40.0
# What an actor reported longer ago says nothing about the processes of its engine.
STALE_S = 15.0
PAUSE_S = 1.0
# Between two parts of a log: an engine may write faster than its copy should grow.
LOG_PAUSE_S = 0.25
# While the cluster cannot be reached, an engine is dead after so many refused connections.
REFUSALS = 3
# The log of an engine here is a copy, with the guardian's bound.
MAX_LOG_BYTES = 16 * 1024 * 1024


class RayProcesses:
    """The processes of an engine on a node, as its actor reports them. See `EngineProcesses`.

    They are those of one rank, where the engine runs on several nodes.
    """

    # See `JoinedProcesses`.
    ended_on: str | None = None
    elsewhere = ""

    def __init__(
        self,
        launch: Launch,
        cluster: Cluster,
        hello: Mapping[str, Any],
        write: Callable[[str], None],
    ) -> None:
        """`write` takes what the engine writes to its log."""
        self._launch = launch
        self._cluster = cluster
        self._write = write
        self._actor = actor_name(launch.name, hello["rank"])
        # The place of a rank is that of all, which `JoinedProcesses` gives back.
        self._alone = hello["nodes"] == 1
        self._server = str(hello["host"]), int(hello["port"] or 0)
        self.address = f"{hello['host']}:{hello['port']}"
        self.engine_pid = int(hello["pid"])
        self.fingerprint = str(hello["fingerprint"])
        self.frozen = False
        self.lost: str | None = None
        self.taken_over = False
        self.node = str(hello["host"])
        self._place = str(hello["place"])
        self._keep = launch.keep
        self._processes: dict[int, ProcessStat] = {}
        self._reported_at = 0.0
        # The server has accepted connections.
        self.listens = False
        self._log_at: list[int] | None = None
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._commands: set[asyncio.Task[None]] = set()
        self._watching = asyncio.create_task(self._watch(), name=f"actor {self._actor}")

    def live_processes(self) -> Mapping[int, ProcessStat]:
        """Return the processes of the latest report; none if that is too old."""
        stale = asyncio.get_running_loop().time() - self._reported_at > STALE_S
        return {} if stale else self._processes

    async def find_processes(self) -> Mapping[int, ProcessStat]:
        """Return the processes of the latest report: the actor searches for them itself."""
        return self.live_processes()

    def keep(self, keep: bool) -> None:
        """Set whether the engine keeps running without a gateway; the next call tells it so."""
        self._keep = keep

    def stop(self, grace: float) -> None:
        """Stop the engine gracefully, by force after `grace` seconds."""

        async def stop() -> None:
            while not self._exit.done():
                try:
                    await self._cluster.call(
                        "stop", name=self._actor, owner=self._cluster.owner, grace=grace
                    )
                except ActorDead:
                    return
                except ClusterError:
                    await asyncio.sleep(PAUSE_S)  # the connector is replaced
                else:
                    return

        self._run(stop())

    def kill(self) -> None:
        """Kill the engine and end its actor."""

        async def kill() -> None:
            name, cluster = self._launch.name, self._cluster
            try:
                await cluster.call("kill", KILL_S, name=name, owner=cluster.owner)
            except ClusterError as error:
                cluster.abandon(name)
                log.warning(
                    "engine %s may still run on %s: %s",
                    *(name, self._node, error),
                    extra={"engine": name},
                )
            self._end(-signal.SIGKILL)

        self._run(kill())

    async def wait(self) -> int:
        """Wait until the engine has ended and its place is free; return its exit code."""
        code = await asyncio.shield(self._exit)
        self.close()
        return code

    def close(self) -> None:
        """Stop watching; the actor keeps the engine or ends it."""
        self._watching.cancel()

    def _run(self, command: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(command)
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)

    async def _watch(self) -> None:
        """Read reports until the engine has ended or its actor is lost."""
        try:
            await self._read_reports()
        except Exception:
            log.exception(
                "engine %s: unhandled exception while reading reports of its actor",
                self._launch.name,
                extra={"engine": self._launch.name},
            )
            await self._lose("the reports of its actor could not be read; the log has the reason")

    async def _read_reports(self) -> None:
        loop, name = asyncio.get_running_loop(), self._actor
        unreachable, refusals = False, 0
        while not self._exit.done():
            try:
                report = await self._cluster.call(
                    "watch",
                    WATCH_TIMEOUT_S,
                    name=name,
                    owner=self._cluster.owner,
                    keep=self._keep,
                    log_at=self._log_at,
                    listens=self.listens,
                    wait_s=WATCH_S,
                )
            except ActorDead as error:
                await self._lose(f"the node {self.node} or its actor there is lost: {error}")
                return
            except ClusterError as error:
                if not unreachable:
                    log.warning(
                        "engine %s serves on, but its actor cannot be reached: %s",
                        *(name, error),
                        extra={"engine": self._launch.name},
                    )
                unreachable = True
                refusals = refusals + 1 if self.listens and await self._refuses() else 0
                if refusals >= REFUSALS:
                    self.lost = f"nothing listens at {self.address} any more, and {error}"
                    self._end(-signal.SIGKILL)
                    return
                await asyncio.sleep(PAUSE_S)
                continue
            unreachable, refusals = False, 0
            if "owned_by" in report:
                self.lost = f"it was taken over by the gateway {report['owned_by']}"
                self.taken_over = True
                self._end(0)
                return
            self._reported_at = loop.time()
            self._processes = {
                int(pid): ProcessStat(state, 0, 0, 0) for pid, state in report["processes"].items()
            }
            self.frozen, listens = report["frozen"], report["listens"]
            self._log_at = report["log_at"]
            self._write(report["log"])
            self.listens = listens  # with all in its log that came before
            if report["exit"] is not None:
                await self._give_back_place()
                self._end(int(report["exit"]))
            elif report["log"]:
                await asyncio.sleep(LOG_PAUSE_S)

    async def _refuses(self) -> bool:
        """Return whether the engine's machine refuses a connection to its server."""
        try:
            async with asyncio.timeout(PAUSE_S):
                _, writer = await asyncio.open_connection(*self._server)
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        writer.close()
        return False

    async def _lose(self, reason: str) -> None:
        self.lost = reason
        await self._give_back_place()
        self._end(-signal.SIGKILL)

    async def _give_back_place(self) -> None:
        if not self._alone:
            return
        # What is left is removed before the next start; the actor gives it back itself.
        await remove_place(self._cluster, self._launch.name, self._place)

    def _end(self, code: int) -> None:
        if not self._exit.done():
            self._exit.set_result(code)


async def _unless_stopped(
    call: Coroutine[Any, Any, Any], stopping: Callable[[], bool], grace_s: float
) -> Any:
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


async def remove_place(cluster: Cluster, engine: str, place: str) -> None:
    """Give a place back, or later if the cluster does not respond."""
    try:
        await cluster.call("remove", GIVE_BACK_S, place=place)
    except ClusterError:
        cluster.abandon(engine)


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
        self._spec = launch.spec
        self._cluster = cluster
        self._clients = clients
        self._launcher = launcher
        self._tls = tls
        self._context = None if tls is None else tls.context()
        self._processes: RayProcesses | JoinedProcesses | None = None
        # The names of its actors.
        self._actors: list[str] = []

    @property
    def listening(self) -> bool:
        """True when the actor has connected to the engine's server."""
        return self._processes is not None and self._processes.listens

    async def find(self, stopping: Callable[[], bool]) -> EngineProcesses | None:
        """Return the engine of this name in the cluster, of this gateway or of a silent one."""
        self._processes = None
        cluster, name = self._cluster, self._launch.name
        cluster.join(name)
        try:
            claiming = cluster.call(
                "claim", name=name, owner=cluster.owner, owner_name=cluster.owner_name
            )
            found = await _unless_stopped(claiming, stopping, FIND_S)
        except ClusterError as error:
            cluster.abandon(name)
            raise HostUnavailable(str(error)) from None
        if "owned_by" in found:
            raise HostUnavailable(
                f"an engine of this name in the namespace {cluster.namespace} of the Ray cluster "
                f"belongs to the gateway {found['owned_by']}: set another ray.namespace"
            )
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
            hello = await self._start(place, needed, stopping)
        except ClusterError as error:
            await remove_place(cluster, launch.name, place)
            if isinstance(error, EngineRefused):
                raise LaunchError(str(error)) from None
            raise HostUnavailable(str(error)) from None
        return self._connected(hello)

    async def used_gib(self, processes: EngineProcesses) -> float | None:
        """Return the GiB that the engine uses on its nodes; None: not known."""
        with contextlib.suppress(ClusterError):
            calls = (self._cluster.call("used_gib", name=actor) for actor in self._actors)
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
        self, place: str, needed: Mapping[str, float], stopping: Callable[[], bool]
    ) -> None:
        """Return when the cluster has a place. Raises ClusterError, also on a stop."""
        loop, cluster = asyncio.get_running_loop(), self._cluster
        count = self._spec.nodes
        if fault := placement_fault(needed, await cluster.nodes(), count):
            raise ClusterError(fault)
        await cluster.call("reserve", place=place, needed=needed, nodes=count)
        deadline = loop.time() + PLACE_S
        while not await cluster.call("is_reserved", place=place, wait_s=PLACE_POLL_S):
            if stopping():
                raise ClusterError("stopped while it waited for a place in the Ray cluster")
            if loop.time() >= deadline:
                nodes = await cluster.nodes()
                asked = needed, nodes, count
                raise ClusterError(placement_fault(*asked) or occupied(*asked))

    async def _start(
        self, place: str, needed: Mapping[str, float], stopping: Callable[[], bool]
    ) -> Mapping[str, Any]:
        """Start an actor with the engine; return how to reach it. Raises ClusterError."""
        arguments = {"name": self._launch.name, "place": place, "needed": needed}
        call = self._cluster.call("start", START_S, **arguments, plan=self._plan())
        # The actor ends with its place.
        hello: Mapping[str, Any] = await _unless_stopped(call, stopping, 0.0)
        return hello

    def _plan(self) -> dict[str, object]:
        """Return what the actor starts; see `EngineActor.start`."""
        launch, cluster = self._launch, self._cluster
        withheld: Collection[str] = launch.withheld
        return {
            "owner": cluster.owner,
            "owner_name": cluster.owner_name,
            "namespace": cluster.namespace,
            "nodes": self._spec.nodes,
            "fingerprint": launch.fingerprint,
            "lease_s": LEASE_S,
            "launcher": self._launcher,
            "arguments": launch.command,
            "env": launch.own_env,
            "inherit": list(self._spec.inherit_env),
            "withheld": sorted(withheld),
            "gpus": self._spec.gpus is not None,
            "model_path": self._spec.model_path,
            "files": [self._tls.cert_file, self._tls.key_file] if self._tls else [],
        }

    def _connected(self, hello: Mapping[str, Any]) -> EngineProcesses:
        """Direct requests to the engine; return its processes."""
        address = Address(str(hello["host"]), int(hello["port"]), tls=self._tls is not None)
        for client in self._clients:
            key = ("authorization", f"Bearer {hello['key']}")
            client.direct_to(address, (key,), self._context)
        self._processes = processes = self._processes_of([hello, *hello["ranks"]])
        log.info(
            "engine %s runs on %s, pid %d there%s",
            *(self._launch.name, processes.address, processes.engine_pid, processes.elsewhere),
            extra={"engine": self._launch.name},
        )
        return processes

    def _processes_of(self, hellos: Sequence[Mapping[str, Any]]) -> RayProcesses | JoinedProcesses:
        """Return the processes of an engine, from what the actor of each rank says."""
        launch, cluster = self._launch, self._cluster
        self._actors = [actor_name(launch.name, rank) for rank in range(len(hellos))]
        write = functools.partial(_append, launch.log)
        if len(hellos) == 1:
            return RayProcesses(launch, cluster, hellos[0], write)
        merged = MergedLog(write, [(int(one["pid"]), str(one["host"])) for one in hellos])

        async def give_back() -> None:
            merged.flush()
            await remove_place(cluster, launch.name, hellos[0]["place"])

        ranks = [
            RayProcesses(launch, cluster, one, functools.partial(merged.add, rank))
            for rank, one in enumerate(hellos)
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
