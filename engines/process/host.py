"""The interface between a supervised engine and the place where its processes are."""

from collections.abc import Callable, Mapping
from typing import Protocol

from engines.guard.guardian_client import LaunchError
from engines.guard.process_tree import ProcessStat


class HostUnavailable(LaunchError):
    """There is no place for the engine at the moment; a later attempt may find one."""


class EngineProcesses(Protocol):
    """The processes of one run of an engine: its guardian, its API server and all below."""

    @property
    def engine_pid(self) -> int:
        """The PID of the API server, on the machine where it runs."""

    @property
    def fingerprint(self) -> str:
        """A digest of what it was started with; see `Launch.fingerprint`."""

    @property
    def frozen(self) -> bool:
        """True if a signal has stopped the guardian, which then executes no commands."""

    @property
    def lost(self) -> str | None:
        """Why the place where it ran is gone, once `wait` has returned; None: it is not."""

    @property
    def ended_on(self) -> str | None:
        """The node of the rank that ended first, of an engine over several nodes."""

    def live_processes(self) -> Mapping[int, ProcessStat]:
        """Return the processes found so far that still run."""

    async def find_processes(self) -> Mapping[int, ProcessStat]:
        """Search for processes of the engine; return those that run."""

    def keep(self, keep: bool) -> None:
        """Set whether the engine keeps running when no gateway is connected."""

    def stop(self, grace: float) -> None:
        """Stop the engine gracefully, by force after `grace` seconds."""

    def kill(self) -> None:
        """Kill the engine at once; `wait` returns when it is gone."""

    async def wait(self) -> int:
        """Wait until no process of the engine is left; return its exit code, -N for signal N."""

    def close(self) -> None:
        """Disconnect; an engine that is to be kept keeps running."""


class EngineHost(Protocol):
    """The place where the processes of one engine run: this machine, or a node of a cluster."""

    @property
    def listening(self) -> bool:
        """True when the engine's server may accept connections."""

    async def find(self, stopping: Callable[[], bool]) -> EngineProcesses | None:
        """Return the processes of an earlier run that are left. Raises HostUnavailable, OSError.

        Before None is returned, nothing is left of an earlier run. It may be given up when
        `stopping` returns True.
        """

    async def start(self, stopping: Callable[[], bool]) -> EngineProcesses:
        """Start the engine. Raises OSError, LaunchError and HostUnavailable.

        It is given up when `stopping` returns True, with LaunchError.
        """

    async def used_gib(self, processes: EngineProcesses) -> float | None:
        """Return the GiB of memory that the engine uses; None: not known."""

    async def wait_until_released(self, processes: EngineProcesses) -> None:
        """Wait until the memory of the ended processes is free for the next start."""
