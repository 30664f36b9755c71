"""The processes of an engine on a node of a Ray cluster, by the reports of the actor there."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from engines.background_tasks import BackgroundTasks
from engines.guard.process_tree import ProcessStat
from engines.logs import EngineLogger
from engines.process import Launch
from engines.ray import protocol
from engines.ray.cluster import Cluster
from engines.ray.protocol import ActorDead, ClusterError, EngineOwned, Hello
from engines.ray.ranks import actor_name

log = logging.getLogger(__name__)

WATCH_S = 4.0
# What an actor reported longer ago says nothing about the processes of its engine.
STALE_S = 15.0
PAUSE_S = 1.0
# Between two parts of a log: an engine may write faster than its copy should grow.
LOG_PAUSE_S = 0.25
# While the cluster cannot be reached, an engine is dead after so many refused connections.
REFUSALS = 3


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
        hello: Hello,
        write: Callable[[str], None],
    ) -> None:
        """`write` takes what the engine writes to its log."""
        self._launch = launch
        self._logger = EngineLogger(log, launch.name)
        self._cluster = cluster
        self._write = write
        self._actor = actor_name(launch.name, hello.rank)
        # The place of a rank is that of all, which `JoinedProcesses` gives back.
        self._alone = hello.nodes == 1
        self._server = hello.host, hello.port or 0
        self.address = f"{hello.host}:{hello.port}"
        self.engine_pid = hello.pid
        self.fingerprint = hello.fingerprint
        self.frozen = False
        self.lost: str | None = None
        self.taken_over = False
        self.node = hello.host
        self._place = hello.place
        self._keep = launch.keep
        self._processes: dict[int, ProcessStat] = {}
        self._reported_at = 0.0
        # The server has accepted connections.
        self.listens = False
        self._log_at: tuple[int, int] | None = None
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._commands = BackgroundTasks(log)
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
            while not self._watching.done():
                try:
                    await self._cluster.call(
                        protocol.Stop(name=self._actor, owner=self._cluster.owner, grace=grace)
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
                await cluster.call(protocol.Kill(name=name, owner=cluster.owner))
            except ClusterError as error:
                cluster.abandon(name)
                self._logger.warning("may still run on %s: %s", self.node, error)
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
        self._commands.start(command, f"command to {self._launch.name}")

    async def _watch(self) -> None:
        """Read reports until the engine has ended or its actor is lost."""
        try:
            await self._read_reports()
        except Exception:
            self._logger.exception(": unhandled exception while reading reports of its actor")
            await self._lose("the reports of its actor could not be read; the log has the reason")

    async def _read_reports(self) -> None:
        loop, name = asyncio.get_running_loop(), self._actor
        unreachable, refusals = False, 0
        while not self._exit.done():
            try:
                report = await self._cluster.call(
                    protocol.Watch(
                        name=name,
                        owner=self._cluster.owner,
                        keep=self._keep,
                        log_at=self._log_at,
                        listens=self.listens,
                        wait_s=WATCH_S,
                    )
                )
            except EngineOwned as error:
                self.lost = f"it was taken over by the gateway {error}"
                self.taken_over = True
                self._end(0)
                return
            except ActorDead as error:
                await self._lose(f"the node {self.node} or its actor there is lost: {error}")
                return
            except ClusterError as error:
                if not unreachable:
                    reached = "serves on, but its actor cannot be reached: %s"
                    self._logger.warning(reached, error)
                unreachable = True
                refusals = refusals + 1 if self.listens and await self._refuses() else 0
                if refusals >= REFUSALS:
                    self.lost = f"nothing listens at {self.address} any more, and {error}"
                    self._end(-signal.SIGKILL)
                    return
                await asyncio.sleep(PAUSE_S)
                continue
            unreachable, refusals = False, 0
            self._reported_at = loop.time()
            self._processes = {
                pid: ProcessStat(state, 0, 0, 0) for pid, state in report.processes.items()
            }
            self.frozen, listens = report.frozen, report.listens
            self._log_at = report.log_at
            self._write(report.log)
            self.listens = listens  # with all in its log that came before
            if report.exit is not None:
                await self._give_back_place()
                self._end(report.exit)
            elif report.log:
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


async def remove_place(cluster: Cluster, engine: str, place: str) -> None:
    """Give a place back, or later if the cluster does not respond."""
    try:
        await cluster.call(protocol.Remove(place=place))
    except ClusterError:
        cluster.abandon(engine)
