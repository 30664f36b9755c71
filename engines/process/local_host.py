"""This machine as the place of an engine: a guardian as a child process of the gateway."""

import asyncio
from collections.abc import Callable, Mapping

from engines.gpu import EngineMemory
from engines.guard.guardian_client import GuardianClient, find_guardian, start_guardian
from engines.hub import hub_fault
from engines.process.host import EngineProcesses
from engines.process.launch import HubUnreachable, Launch

# Interval at which a check that waits looks whether the engine is to be stopped.
STOPPING_POLL_S = 0.2


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
        if launch.downloads:
            await self._check_hub(environment, stopping)
        launch.set_log_aside()
        await self._memory.record_baseline()
        return await start_guardian(
            launch.directory,
            launch.command,
            environment,
            fingerprint=launch.fingerprint,
            keep=launch.keep,
        )

    async def _check_hub(
        self, environment: Mapping[str, str], stopping: Callable[[], bool]
    ) -> None:
        """Raise HubUnreachable if the model has to be downloaded and cannot be."""
        spec = self._launch.spec
        # In a thread that is not waited for: a resolver may take long.
        check = asyncio.ensure_future(
            asyncio.to_thread(hub_fault, spec.model, spec.args, environment)
        )
        while not check.done() and not stopping():
            await asyncio.wait({check}, timeout=STOPPING_POLL_S)
        if check.done() and (fault := check.result()) is not None:
            raise HubUnreachable(fault)

    async def used_gib(self, processes: EngineProcesses) -> float | None:
        # Found anew: of an adopted engine only the API server is known at first.
        return await self._memory.used_gib(await processes.find_processes())

    async def wait_until_released(self, processes: EngineProcesses) -> None:
        assert isinstance(processes, GuardianClient)
        await self._memory.wait_until_released(processes.pids)
