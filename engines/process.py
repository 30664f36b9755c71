"""A vLLM server as a supervised child process on a Unix socket.

One task, `_life`, starts the guardian, watches it and writes the state; everybody else asks for an
outcome. The guardian (`guardian.py`) is the parent of all that the engine starts, and reports when
nothing of it is left.
"""

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from engines.base import EngineFacts, EngineRequest, EngineState, EngineUnavailable, Progress
from engines.http1 import Address, Http1Client, Http1Response
from engines.lifecycle import Event, after
from engines.log import EngineLog
from engines.probe import Probe
from engines.spec import ProcessSpec
from engines.startup import failure_of

log = logging.getLogger(__name__)

GUARDIAN = Path(__file__).with_name("guardian.py")
PROBE_S = 0.2
# A guardian reports within its own sweep bound after the grace; later than this it is stuck.
GUARDIAN_SLACK_S = 15.0
# struct sockaddr_un holds 108 bytes, the last one a zero (unix(7)).
LONGEST_SOCKET_PATH = 107
# Nothing of the gateway's own configuration, keys above all, is an engine's business.
PRIVATE_PREFIX = "GATEWAY_"


class LauncherMissing(Exception):
    """vLLM is not installed in this environment."""


def vllm_launcher() -> tuple[str, ...]:
    """Return the command that runs vLLM's OpenAI server with this interpreter.

    Newer vLLM (0.32, for one) keeps it in `launchers`, older in `openai`. The `vllm` command does
    not run from the CPU build, whose distribution has another name. Raises LauncherMissing.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise LauncherMissing("vLLM is not installed here: run `make setup`, or use kind: remote")
    module = "vllm.entrypoints.launchers.api_server.entry"
    if not (Path(spec.origin).parent / "entrypoints/launchers/api_server/entry.py").exists():
        module = "vllm.entrypoints.openai.api_server"
    return (sys.executable, "-m", module)


class ProcessEngine:
    """One vLLM server; see `engines.base.Engine`."""

    def __init__(
        self,
        name: str,
        spec: ProcessSpec,
        *,
        served_name: str,
        run_dir: Path,
        launcher: Sequence[str],
    ) -> None:
        self._name = name
        self._spec = spec
        self._served_name = served_name
        self._dir = run_dir / name
        self._socket = self._dir / "http.sock"
        self._launcher = tuple(launcher)
        self._log = EngineLog(self._dir / "engine.log")
        self._client = Http1Client(Address(uds=str(self._socket)), spec.timeouts)
        self._state = EngineState.STOPPED
        self._facts = EngineFacts()
        self._last_error: str | None = None
        self._life_task: asyncio.Task[None] | None = None
        # Replaced at every change of state, so that each waiter sees each change.
        self._changed = asyncio.Event()
        self._drain_asked = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self._grace = 0.0
        self._engine_pid: int | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def progress(self) -> Progress | None:
        return None

    @property
    def restarts(self) -> int:
        return 0

    @property
    def load_s(self) -> float | None:
        return None

    @property
    def last_error(self) -> str | None:
        return self._last_error

    @property
    def pid(self) -> int | None:
        """The API server's process, while there is one."""
        return self._engine_pid

    def command(self) -> list[str]:
        """Return the engine's whole command line."""
        return [
            *self._launcher,
            f"--model={self._spec.model}",
            f"--served-model-name={self._served_name}",
            f"--uds={self._socket}",
            *self._spec.argv(),
        ]

    def describe(self) -> str:
        return shlex.join(self.command())

    def recent_log(self) -> list[str]:
        """Return the newest lines of the engine's output."""
        return self._log.lines()

    async def ensure_ready(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        if self._state is EngineState.STOPPED and self._life_task is None:
            self._life_task = loop.create_task(self._life(), name=f"engine {self._name}")
        try:
            async with asyncio.timeout_at(deadline):
                while self._state in (EngineState.STOPPED, EngineState.STARTING):
                    await self._changed.wait()
        except TimeoutError:
            raise EngineUnavailable(f"engine {self._name} is still {self._state}") from None
        if self._state is not EngineState.READY:
            raise EngineUnavailable(self._last_error or f"engine {self._name} is {self._state}")

    async def send(self, request: EngineRequest) -> Http1Response:
        if self._state is not EngineState.READY:
            raise EngineUnavailable(f"engine {self._name} is {self._state}")
        return await self._client.send(request)

    async def drain(self) -> None:
        self._drain_asked.set()
        while self._state is EngineState.READY:
            await self._changed.wait()
        while self._client.in_flight and self._state is EngineState.DRAINING:
            await self._client.quiet()

    async def stop(self, grace: float) -> None:
        self._grace = grace
        self._stop_asked.set()
        if self._life_task is not None:
            await asyncio.shield(self._life_task)
        if self._state is EngineState.FAILED:
            self._fire(Event.STOP)

    # The owner of the state

    def _fire(self, event: Event) -> None:
        self._state = after(self._state, event)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _life(self) -> None:
        try:
            self._fire(Event.START)
            guardian = await self._spawn()
            await self._live(guardian)
        except (OSError, _StartError) as error:
            self._failed(str(error))
        except Exception:
            log.exception("engine %s: a fault of the gateway's own", self._name)
            self._failed("a fault of the gateway's own; its log has the trace")

    async def _live(self, guardian: asyncio.subprocess.Process) -> None:
        """Watch a running engine until nothing of it is left."""
        gone = asyncio.create_task(self._until_gone(guardian), name=f"guardian of {self._name}")
        stop = asyncio.create_task(self._stop_asked.wait())
        drain = asyncio.create_task(self._drain_asked.wait())
        try:
            await self._started(gone, stop)
            if self._state is EngineState.READY:
                await asyncio.wait({gone, stop, drain}, return_when=asyncio.FIRST_COMPLETED)
                if drain.done() and not gone.done() and not stop.done():
                    self._fire(Event.DRAIN)
                    await asyncio.wait({gone, stop}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self._failed(self._why(gone.result()))
                return
            if not stop.done():  # the start took too long; _started left the reason
                await self._end(guardian, gone, 0.0)
                self._failed(self._last_error or "did not start")
                return
            self._fire(Event.STOP)
            await self._end(guardian, gone, self._grace)
            self._fire(Event.EXIT)
        finally:
            self._client.close()
            self._engine_pid = None
            for task in (gone, stop, drain):
                task.cancel()
            if guardian.returncode is None:  # this task was cancelled
                self._kill(guardian)

    async def _spawn(self) -> asyncio.subprocess.Process:
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._dir.chmod(0o700)
        if len(os.fsencode(str(self._socket))) > LONGEST_SOCKET_PATH:
            raise _StartError(
                f"the path {self._socket} is too long for a socket: set server.run_dir"
            )
        if missing := self._spec.missing_model():
            raise _StartError(missing)
        self._socket.unlink(missing_ok=True)
        if self._log.path.exists():
            self._log.path.replace(self._log.path.with_suffix(".log.previous"))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(PRIVATE_PREFIX)}
        guardian = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", str(GUARDIAN), str(self._log.path), *self.command()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment | self._spec.env,
            start_new_session=True,
        )
        first = await self._hear(guardian)
        if "pid" not in first:
            self._kill(guardian)
            await guardian.wait()
            raise _StartError(str(first.get("error", "the guardian did not start")))
        self._engine_pid = int(str(first["pid"]))
        return guardian

    async def _started(self, gone: asyncio.Task[int], stop: asyncio.Task[bool]) -> None:
        """Return when the engine is READY, gone, told to stop, or too late."""
        probe = Probe(self._client)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._spec.start_timeout_s
        while loop.time() < deadline:
            done, _ = await asyncio.wait(
                {gone, stop}, timeout=PROBE_S, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return
            if self._socket.exists() and await probe.healthy():
                self._facts = await probe.facts()
                self._fire(Event.LOADED)
                return
        self._last_error = f"not ready after {self._spec.start_timeout_s:g} s (start_timeout_s)"

    async def _until_gone(self, guardian: asyncio.subprocess.Process) -> int:
        """Return the engine's exit code once nothing of the engine is left."""
        last = await self._hear(guardian)
        await guardian.wait()
        if "exit" not in last:
            # The guardian was killed. Its death took the API server; the group is ours to end.
            self._kill_group()
            return -signal.SIGKILL
        return int(str(last["exit"]))

    async def _hear(self, guardian: asyncio.subprocess.Process) -> dict[str, object]:
        assert guardian.stdout is not None
        line = await guardian.stdout.readline()
        message: dict[str, object] = json.loads(line) if line else {}
        return message

    async def _end(
        self, guardian: asyncio.subprocess.Process, gone: asyncio.Task[int], grace: float
    ) -> None:
        assert guardian.stdin is not None
        with contextlib.suppress(OSError):
            guardian.stdin.write(b"stop %f\n" % grace)
            await guardian.stdin.drain()
        done, _ = await asyncio.wait({gone}, timeout=grace + GUARDIAN_SLACK_S)
        if not done:
            log.error("engine %s: its guardian does not answer, killing the group", self._name)
            self._kill(guardian)
            await asyncio.wait({gone})

    def _kill(self, guardian: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            guardian.kill()
        self._kill_group()

    def _kill_group(self) -> None:
        if self._engine_pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._engine_pid, signal.SIGKILL)

    def _failed(self, reason: str) -> None:
        self._last_error = reason
        self._fire(Event.FAIL)
        log.error("engine %s failed: %s", self._name, reason)

    def _why(self, code: int) -> str:
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if self._state is EngineState.READY or self._state is EngineState.DRAINING:
            return f"it died while serving ({ended})"
        failure = failure_of(self.recent_log())
        return str(failure) if failure else f"it ended while starting ({ended})"


class _StartError(Exception):
    """The engine could not even be run."""
