"""This machine as the place of an engine: a guardian as a child process of the gateway."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from engines import interpreter
from engines.gpu import EngineMemory
from engines.guard.guardian_client import (
    GuardianClient,
    LaunchError,
    find_guardian,
    start_guardian,
)
from engines.hub import hub_fault
from engines.process.host import EngineProcesses, HostUnavailable
from engines.process.launch import HubUnreachable, Launch

# Interval at which a check that waits looks whether the engine is to be stopped.
STOPPING_POLL_S = 0.2

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class LocalHost:
    """Starts and finds the guardian of one engine on this machine."""

    def __init__(self, launch: Launch, memory: EngineMemory) -> None:
        self._launch = launch
        self._memory = memory

    @property
    def listening(self) -> bool:
        """See `EngineHost`, here and below."""
        return self._launch.socket.exists()

    async def find(self, stopping: Callable[[], bool]) -> GuardianClient | None:
        return await find_guardian(self._launch.directory)

    async def start(self, stopping: Callable[[], bool]) -> GuardianClient:
        launch = self._launch
        environment = launch.prepare()
        if launch.python is not None:
            try:
                await _unless_stopped(stopping, interpreter.probe, launch.python)
            except interpreter.InterpreterTimeout as fault:
                raise HostUnavailable(f"python: {fault}") from None
            except interpreter.InterpreterFault as fault:
                raise LaunchError(f"python: {fault}") from None
        if launch.downloads:
            model, args = launch.spec.model, launch.spec.args
            unreachable = await _unless_stopped(stopping, hub_fault, model, args, environment)
            if unreachable is not None:
                raise HubUnreachable(unreachable)
        launch.set_log_aside()
        await self._memory.record_baseline()
        return await start_guardian(
            launch.directory,
            launch.command,
            environment,
            fingerprint=launch.fingerprint,
            keep=launch.keep,
        )

    async def used_gib(self, processes: EngineProcesses) -> float | None:
        # Found anew: of an adopted engine only the API server is known at first.
        return await self._memory.used_gib(await processes.find_processes())

    async def wait_until_released(self, processes: EngineProcesses) -> None:
        assert isinstance(processes, GuardianClient)
        await self._memory.wait_until_released(processes.pids)


async def _unless_stopped(
    stopping: Callable[[], bool],
    function: Callable[Arguments, Result],
    *arguments: Arguments.args,
    **named: Arguments.kwargs,
) -> Result | None:
    """Return what a function that blocks returns; None if `stopping` returns True before."""
    # In a thread that is not waited for: a resolver or a disk may take long.
    calling = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named))
    while not calling.done() and not stopping():
        await asyncio.wait({calling}, timeout=STOPPING_POLL_S)
    return calling.result() if calling.done() else None
