"""A vLLM engine inside the gateway's own process: `AsyncLLM`, and vLLM's own ASGI application.

EngineCore and its workers are child processes. `AsyncLLM` is built in a thread, which vLLM 0.32
allows (its sockets take the event loop that uses them first), so the gateway serves other models
meanwhile. Changes that vLLM makes to its host process are undone: see `engines.inprocess.hosted`.

One task, `_supervise`, builds the engine, watches it and writes the state; callers set an event
(stop, drain) and wait for the state. The engine's processes carry a mark. A sentinel process kills
what carries it when the gateway is gone; before every start and after every end no process may
carry it (see `engines.guard.marked_processes`).
"""

import asyncio
import contextlib
import gc
import logging
import os
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from engines import environment, media
from engines.base import (
    Engine,
    EngineCapabilities,
    EngineNotReady,
    EngineRequest,
    EngineState,
    Progress,
    Start,
)
from engines.guard import directories, scratch
from engines.guard.marked_processes import kill_marked
from engines.http import EngineProbe, ResponseBody, scrape_metrics
from engines.hub import hub_fault
from engines.inprocess.bridge import Bridge
from engines.inprocess.hosted import BuildFailed, Construction, end_tracker
from engines.lifecycle import Event
from engines.logs import EngineLogger
from engines.output import EngineLog, redact_command, redact_line
from engines.output.startup import StartupLog
from engines.restarts import GIVEN_UP, RestartBudget
from engines.setup import EngineSetup
from engines.spec import InProcessSpec

log = logging.getLogger(__name__)

SENTINEL = Path(__file__).parents[1] / "guard" / "marked_processes.py"
# Interval of killing the processes of an abandoned start, until vLLM's constructor returns.
ABANDON_S = 0.2


class InProcessEngine(Engine):
    """A vLLM engine in this process.

    An engine that has served is restarted when it dies, by `spec.restart`. One that was never READY
    is not: the cause is in the configuration as a rule, and a start is expensive for the host.
    """

    kind = "in_process"
    capabilities = EngineCapabilities(managed=True)

    def __init__(self, setup: EngineSetup, spec: InProcessSpec) -> None:
        super().__init__(setup.name)
        self._logger = EngineLogger(log, setup.name)
        self._setup = setup
        self._env = {**media.ENV, **setup.env, **spec.env}
        self._turn = setup.turn or asyncio.Semaphore()
        self._spec = spec
        self._dir = setup.directory
        self._mark = str(self._dir)
        self._log = EngineLog(self._dir / "engine.log")
        self._load_began: float | None = None  # in the loop's time, while it is STARTING
        self._construction: Construction | None = None  # from START to the end of the run
        # Both are set while it is READY or DRAINING.
        self._bridge: Bridge | None = None
        self._control: Bridge | None = None  # the gateway's own requests
        self._task: asyncio.Task[None] | None = None
        self._drain_requested = asyncio.Event()
        self._stop_requested = asyncio.Event()
        self._grace = 0.0
        # Ends the sentinel, which runs from the first load to the end of the task.
        self._guard = contextlib.AsyncExitStack()
        self._guarded = False

    @property
    def progress(self) -> Progress | None:
        construction = self._construction
        starting = self._status.state is EngineState.STARTING
        return construction.progress if starting and construction is not None else None

    @property
    def starting(self) -> Start | None:
        if not self._coming_up or self._stop_requested.is_set() or self._drain_requested.is_set():
            return None
        began = self._load_began
        if self._status.state is EngineState.STARTING and began is not None:
            return Start(asyncio.get_running_loop().time() - began, self._status.load_s)
        return Start(0.0, self._status.load_s)

    @property
    def blocked_by(self) -> str | None:
        return GIVEN_UP if self.given_up else None

    def argv(self) -> list[str]:
        """Return the engine's arguments, as `vllm serve` reads them."""
        names = [f"--model={self._spec.model}", f"--served-model-name={self._setup.served_name}"]
        return [*names, *self._spec.added_flags(self._setup.media_domains), *self._spec.argv()]

    def _withheld_names(self) -> list[str]:
        """Return the variables of the gateway that the engine's processes do not inherit."""
        more = (*self._spec.inherit_env, *self._env)
        withheld = [name for name in self._setup.withheld if name not in self._env]
        kept = environment.inherited(os.environ, more, withheld)
        return sorted(os.environ.keys() - kept.keys())

    def describe(self) -> str:
        return f"in this process: {redact_command(shlex.join(self.argv()))}"

    def recent_log(self) -> list[str]:
        """Return the newest lines of the engine's output."""
        self._log.read()
        return self._log.lines()

    @property
    def given_up(self) -> bool:
        return self._status.state is EngineState.FAILED and not self._coming_up

    async def ensure_ready(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        if self._status.state is EngineState.STOPPED and self._task is None:
            self._task = loop.create_task(self._supervise(), name=f"engine {self._name}")
            # `given_up` and `starting` depend on the task as well.
            self._task.add_done_callback(lambda _: self.changes.notify())
        try:
            async with asyncio.timeout_at(deadline):
                await self.changes.wait_for(lambda: not self._coming_up)
        except TimeoutError:
            raise EngineNotReady(f"engine {self._name} is still {self._status.state}") from None
        if self._status.state is not EngineState.READY:
            raise EngineNotReady(
                self._status.last_error or f"engine {self._name} is {self._status.state}"
            )

    async def send(self, request: EngineRequest) -> ResponseBody:
        # From the moment of a drain or a stop on, before the task has taken note.
        leaving = self._drain_requested.is_set() or self._stop_requested.is_set()
        if leaving or self._status.state is not EngineState.READY or self._bridge is None:
            raise EngineNotReady(f"engine {self._name} is {self._status.state}")
        return await self._bridge.send(request)

    async def exposition(self) -> bytes:
        if self._control is None:
            raise EngineNotReady(f"engine {self._name} is {self._status.state}")
        return await scrape_metrics(self._control)

    async def drain(self) -> None:
        self._drain_requested.set()
        await self.changes.wait_for(lambda: self.state is not EngineState.READY)
        while (
            self._status.state is EngineState.DRAINING and self._bridge and self._bridge.in_flight
        ):
            await self._bridge.quiet()

    async def stop(self, grace: float) -> None:
        self._grace = grace
        self._stop_requested.set()
        if self._task is not None:
            await asyncio.shield(self._task)
            self._task = None
        if self._status.state is EngineState.FAILED:
            self._status.fire(Event.STOP)
        self._stop_requested.clear()
        self._drain_requested.clear()

    # The owner of the state

    @property
    def _coming_up(self) -> bool:
        """True while it may become READY by itself."""
        alive = self._task is not None and not self._task.done()
        return alive and self._status.state in (
            EngineState.STOPPED,
            EngineState.STARTING,
            EngineState.FAILED,
        )

    async def _supervise(self) -> None:
        self._status.fire(Event.START)
        try:
            async with self._guard:
                await self._run_until_stopped()
        except Exception:
            self._logger.exception("failed: unhandled exception in the gateway")
            if self._status.state is not EngineState.FAILED:
                self._set_failed("unhandled exception in the gateway; its log has the traceback")
        finally:
            self._guarded = False

    async def _run_until_stopped(self) -> None:
        """Run the engine again and again until it is stopped or given up."""
        budget = RestartBudget(self._spec.restart)
        served_s = 0.0
        while True:
            served_s += await self._run_once()
            if served_s:
                # vLLM's objects hold each other in cycles; free them before the next run.
                await asyncio.to_thread(gc.collect)
            if self._status.state is not EngineState.FAILED or self._drain_requested.is_set():
                return
            pause = budget.next(served_s) if served_s else None
            if pause is None:
                return
            self._logger.info("restarts in %g s", pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stop_requested.wait()
                return
            self._status.restarts += 1
            self._status.fire(Event.START)

    async def _run_once(self) -> float:
        """Run it from STARTING to STOPPED or FAILED, until nothing of it is left.

        Returns the seconds for which it served; 0: it was never READY.
        """
        loop = asyncio.get_running_loop()
        self._load_began = started = loop.time()
        timeout = self._spec.start_timeout_s
        self._construction = Construction(self.argv(), self._env, self._dir, self._withheld_names())
        starting = asyncio.create_task(self._start(self._construction))
        stop = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait(
                {starting, stop}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if stop.done():
                self._status.fire(Event.STOP)
                return 0.0
            if not starting.done():
                self._set_failed(f"not ready after {timeout:g} s (start_timeout_s)")
                return 0.0
            self._bridge = clients = starting.result()
            self._control = Bridge(clients.address, clients.app, clients.timeouts, clients.dead)
            ready = loop.time()
            self._status.load_s = ready - started
            self._status.last_error = None
            self._status.fire(Event.LOADED)
            if self._status.restarts:
                self._logger.info("ready after a restart")
            await self._serve(self._construction, stop)
            return loop.time() - ready
        except BuildFailed as error:
            self._set_failed(str(error))
            return 0.0
        finally:
            stop.cancel()
            await self._clear(self._construction, starting)
            self._construction = None
            if self._status.state is EngineState.STOPPING:
                self._status.fire(Event.EXIT)

    async def _start(self, construction: Construction) -> Bridge:
        """Build the engine; return a client of its application. Raises BuildFailed."""
        if missing := self._spec.missing_model():
            raise BuildFailed(missing)
        with self._directory_faults():
            directories.make_private(self._dir)
            self._dir.chmod(0o700)
            if self._log.path.exists():
                self._log.path.replace(self._log.path.with_suffix(".log.previous"))
        async with self._turn:  # before the first wait: engines load in the order of their start
            await self._sweep()
            variables = {**os.environ, **self._env}
            if fault := await asyncio.to_thread(
                hub_fault, self._spec.model, self._spec.args, variables
            ):
                raise BuildFailed(fault)
            if not self._guarded:
                await self._guard.enter_async_context(_sentinel(self._mark))
                self._guarded = True
            if scratch.TMPDIR not in self._env:
                with self._directory_faults():
                    construction.temporary = scratch.create(self._dir)
            hosted = await asyncio.to_thread(construction.run)
        try:
            app = await hosted.application()
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises
            raise BuildFailed(construction.reason(error)) from None
        bridge = Bridge(f"engine {self._name}", app, self._spec.timeouts, hosted.dead)
        startup = StartupLog()
        for line in self._log.read():
            startup.feed(line)
        self._status.facts = startup.facts.updated(await EngineProbe(bridge).fetch_facts())
        return bridge

    @contextlib.contextmanager
    def _directory_faults(self) -> Iterator[None]:
        """Raise BuildFailed for what is wrong with the engine's directories."""
        try:
            yield
        except (directories.ForeignDirectory, scratch.SocketPathTooLong) as error:
            raise BuildFailed(str(error)) from None
        except OSError as error:
            raise BuildFailed(f"{self._dir}: {error.strerror}") from None

    async def _serve(self, construction: Construction, stop: asyncio.Task[bool]) -> None:
        """Watch a READY engine until it is stopped or dies."""
        assert construction.hosted is not None
        died = asyncio.create_task(
            construction.hosted.wait_for_death(self._spec.progress_timeout_s)
        )
        drain = asyncio.create_task(self._drain_requested.wait())
        try:
            await asyncio.wait({stop, drain, died}, return_when=asyncio.FIRST_COMPLETED)
            if drain.done() and not stop.done() and not died.done():
                self._status.fire(Event.DRAIN)
                await asyncio.wait({stop, died}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                self._status.fire(Event.STOP)
            else:
                self._set_failed(f"it died while serving: {died.result()}")
        finally:
            drain.cancel()
            died.cancel()

    async def _clear(self, construction: Construction, starting: asyncio.Task[Bridge]) -> None:
        """Return when nothing of an engine is left, whether it was built or not."""
        construction.abandon()
        while construction.running:
            # vLLM's constructor returns when EngineCore ends.
            await self._sweep()
            await asyncio.sleep(ABANDON_S)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        bridges, self._bridge, self._control = (self._control, self._bridge), None, None
        for bridge in bridges:
            if bridge is not None:
                await bridge.close()
        if construction.hosted is not None:
            grace = self._grace if self._status.state is EngineState.STOPPING else 0.0
            await asyncio.to_thread(construction.hosted.shutdown, grace)
            construction.hosted = None
        if await self._sweep():
            await asyncio.to_thread(end_tracker)
        await asyncio.to_thread(scratch.remove, self._dir)

    async def _sweep(self) -> bool:
        """Kill what is left of its processes; return whether all have ended."""
        left = await asyncio.to_thread(kill_marked, self._mark)
        if left:
            self._logger.error(": processes %s survive SIGKILL", left)
        return not left

    def _set_failed(self, reason: str) -> None:
        self._status.last_error = redact_line(reason)
        self._status.fire(Event.FAIL)
        self._logger.error("failed: %s", self._status.last_error)


@contextlib.asynccontextmanager
async def _sentinel(mark: str) -> AsyncIterator[None]:
    """Run the process that kills what carries the mark if this one ends before the body does."""
    sentinel = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-S", str(SENTINEL), mark),
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={},
    )
    try:
        yield
    finally:
        assert sentinel.stdin is not None
        sentinel.stdin.close()
        await sentinel.wait()
