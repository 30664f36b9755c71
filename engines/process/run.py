"""One run of a vLLM server, from its start (or adoption) to the end of its last process."""

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from engines.base import EngineState, Progress
from engines.guard.guardian_client import LaunchError
from engines.guard.process_tree import GUARDIAN_SLACK_S
from engines.http import EngineProbe, Http1Client
from engines.hub_progress import follow_download
from engines.lifecycle import Event
from engines.logs import EngineLogger
from engines.output import EngineLog
from engines.output.failure import Cause
from engines.output.startup import StartupLog
from engines.process import watchdog
from engines.process.adapter_loader import AdapterFault, AdapterLoader
from engines.process.host import EngineHost, EngineProcesses, HostUnavailable
from engines.process.launch import HubUnreachable, Launch
from engines.process.shared_state import DesiredState, SharedState
from engines.process.sleep_mode import SleepFault, put_to_sleep, wake
from engines.process.watchdog import Sample, Watchdog, stopped, take_sample

log = logging.getLogger(__name__)

# Interval of the health checks of an engine that is starting.
PROBE_S = 0.2
# Interval at which the cache of a model that is downloaded is read.
DOWNLOAD_S = 1.0
# Once a minute the engine's processes are looked for among all of the machine's and their memory is
# measured: reading what a large process holds is work for the kernel.
SAMPLES_PER_MEASUREMENT = 12
# Seconds that an engine of another configuration has to finish its requests.
RETIRE_S = 30.0

State = EngineState


# Faults of a start that end without a change of the configuration: when a disk has room or may be
# written again, when files, processes and memory are there again.
PASSING = frozenset(
    (
        errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO,
        errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM,
    )
)  # fmt: skip


# The same of a disk, as engines report them.
DISK_FAULTS = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS)))


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason of an end that was not requested."""

    reason: str
    # A restart without a change will not help.
    permanent: bool = False
    cause: Cause = Cause.OTHER
    # There is no place for it; another attempt follows, and does not count against the budget.
    no_place: bool = False

    @property
    def of_disk(self) -> bool:
        """True if a disk was full or read-only."""
        return any(text in self.reason for text in DISK_FAULTS)


class EngineRun:
    """One run of an engine. Use it once."""

    def __init__(
        self,
        launch: Launch,
        host: EngineHost,
        shared: SharedState,
        *,
        client: Http1Client,
        control: Http1Client,
        adapters: AdapterLoader,
        engine_log: EngineLog,
        turn: asyncio.Semaphore | None,
        on_ready: Callable[[], None],
        on_failure: Callable[[Failure], None],
    ) -> None:
        """`client` carries requests, `control` the gateway's own; `turn` is held while loading.

        `on_ready` is called before the engine becomes READY, `on_failure` when it is found dead,
        before what is left of it is ended.
        """
        self._launch = launch
        self._logger = EngineLogger(log, launch.name)
        self._host = host
        self._shared = shared
        self._status = shared.status
        self._client = client
        self._control = control
        self._adapters = adapters
        self._probe = EngineProbe(control)
        self._log = engine_log
        self._startup = StartupLog()
        self._turn = turn
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._guardian: EngineProcesses | None = None
        # A phase in the gateway's words; None: the engine's log has it.
        self._phase: str | None = "looking for a running engine"
        # Of the model, while one is seen.
        self._download: Progress | None = None
        # Start of the load or wake, in the loop's time; None: it has not begun.
        self.load_began: float | None = None
        self.served_s = 0.0

    @property
    def progress(self) -> Progress | None:
        if self._phase:
            return Progress(self._phase)
        return self._download or self._startup.progress

    @property
    def pid(self) -> int | None:
        """The API server's process, while there is one."""
        return None if self._guardian is None else self._guardian.engine_pid

    def read_log(self) -> None:
        """Take in the lines that the engine has written since the last call."""
        for line in self._log.read():
            self._startup.feed(line)

    async def execute(self) -> Failure | None:
        """Run the engine; return the reason of a failure, None when it was stopped."""
        self._shared.fire(Event.START)
        self._adapters.begin_run()
        async with contextlib.AsyncExitStack() as turn:
            # Before the first wait: engines load in the order in which they are started.
            acquiring = self._queue_for_turn(turn)
            try:
                guardian = await self._host.find(lambda: self._shared.stopping)
            except (OSError, HostUnavailable) as error:
                return self._not_started(error)
            if guardian is not None and guardian.fingerprint != self._launch.fingerprint:
                await turn.aclose()  # its requests may take long to end, and others must not wait
                self._phase = "ending the engine of another configuration"
                await self._retire(guardian)
                guardian = None
                acquiring = self._queue_for_turn(turn)
            adopted = guardian is not None
            if guardian is not None:
                await turn.aclose()
                self._logger.info("adopted, pid %d", guardian.engine_pid)
            else:
                self._phase = "waiting for its turn"
                if not await self._has_turn(acquiring):
                    self._shared.fire(Event.STOP)
                    self._shared.fire(Event.EXIT)
                    return None
                self._phase = "starting processes"
                if self._status.load_s is None:  # the previous gateway's is the best estimate
                    _, self._status.load_s = self._launch.recall()
                try:
                    guardian = await self._host.start(lambda: self._shared.stopping)
                except (OSError, LaunchError) as error:
                    return self._not_started(error)
            self._guardian = guardian
            self._phase = None
            guardian.keep(self._launch.keep)
            exited = asyncio.create_task(guardian.wait(), name=f"guardian of {self._launch.name}")
            following = asyncio.create_task(self._follow_download())
            try:
                failure = await self._wait_until_ready(guardian, exited, adopted=adopted)
                following.cancel()
                await turn.aclose()
                if failure is None and self._status.state is State.READY:
                    failure = await self._serve(guardian, exited)
                failure = await self._finish(guardian, exited, failure)
                await self._host.wait_until_released(guardian)
                return failure
            finally:
                self._guardian = None
                following.cancel()
                exited.cancel()
                self._control.close()
                if self._shared.released:  # requests in flight go on
                    guardian.close()
                else:
                    self._client.close()
                    if not exited.done() or exited.cancelled():  # the task was canceled, or broke
                        guardian.kill()

    # Starting

    def _queue_for_turn(self, stack: contextlib.AsyncExitStack) -> asyncio.Future[Any] | None:
        """Queue for the turn to load; the stack gives back the turn, or the place in the queue."""
        turn = self._turn
        if turn is None:
            return None
        acquiring = asyncio.ensure_future(turn.acquire())

        def give_back() -> None:
            if acquiring.done() and not acquiring.cancelled():
                turn.release()
            else:
                acquiring.cancel()

        stack.callback(give_back)
        return acquiring

    async def _has_turn(self, acquiring: asyncio.Future[Any] | None) -> bool:
        """Wait until the engine may load; return False when it is stopped before."""
        while not self._shared.stopping and acquiring is not None and not acquiring.done():
            await self._shared.wait_for_first(acquiring)
        return not self._shared.stopping

    def _not_started(self, error: OSError | LaunchError) -> Failure | None:
        """Return the failure of an engine without processes; None when it is to be stopped."""
        if self._shared.stopping:
            self._shared.fire(Event.STOP)
            self._shared.fire(Event.EXIT)
            return None
        if isinstance(error, HostUnavailable):
            return Failure(str(error), no_place=True)
        if isinstance(error, HubUnreachable):
            return Failure(str(error), cause=Cause.DOWNLOAD)
        missing = self._launch.missing_model() is not None
        cause = Cause.MISSING_FILES if missing else Cause.OTHER
        reason = str(error)
        if isinstance(error, OSError) and error.filename is None:
            reason = f"{self._launch.directory}: {error.strerror}"
        passing = isinstance(error, OSError) and error.errno in PASSING
        return Failure(reason, permanent=not passing, cause=cause, no_place=passing)

    async def _wait_until_ready(
        self, guardian: EngineProcesses, exited: asyncio.Task[int], *, adopted: bool
    ) -> Failure | None:
        """Return when the engine is READY, has exited, or is to be stopped.

        Returns a failure when the start takes too long, or one of its processes is frozen.
        """
        loop = asyncio.get_running_loop()
        began, timeout = loop.time(), self._launch.spec.start_timeout_s
        self.load_began = began
        monitor, next_sample = Watchdog(inf), began
        while not self._shared.stopping:
            self.read_log()
            if self._host.listening and await self._probe.is_healthy():
                if await self._load_adapters(exited):
                    await self._become_ready(loop.time() - began, adopted=adopted)
                return None
            if exited.done():
                return None
            if (now := loop.time()) - began >= timeout:
                return Failure(f"not ready after {timeout:g} s (start_timeout_s)")
            if now >= next_sample:
                next_sample = now + watchdog.SAMPLE_S
                frozen = stopped((await guardian.find_processes()).items())
                if verdict := monitor.verdict(Sample(now, frozen, 200, 0.0, None)):
                    return Failure(verdict)
            await self._shared.wait_for_first(exited, timeout=PROBE_S)
        return None

    async def _follow_download(self) -> None:
        """Keep `progress` that of the model's download, while there is one."""
        launch = self._launch
        if not launch.downloads:
            return
        download = follow_download(launch.spec.model, launch.spec.args, launch.environment)
        while download is not None:
            self._download = await asyncio.to_thread(download.progress)
            await asyncio.sleep(DOWNLOAD_S)

    async def _load_adapters(self, exited: asyncio.Task[int]) -> bool:
        """Load the adapters; return False when the engine exits or is to be stopped before."""
        if not self._launch.lora:
            return True
        self._phase = "loading adapters"
        loading = asyncio.create_task(self._adapters.load())
        try:
            while not (loading.done() or exited.done() or self._shared.stopping):
                await self._shared.wait_for_first(loading, exited)
            if loading.done() and (error := loading.exception()) is not None:
                self._logger.error(": unhandled exception while adapters load", exc_info=error)
            return loading.done() and not exited.done()
        finally:
            self._phase = None
            loading.cancel()

    async def _become_ready(self, seconds: float, *, adopted: bool) -> None:
        """Record what is known of the engine, and accept requests."""
        reported = await self._probe.fetch_facts()
        self.read_log()
        status = self._status
        if adopted:  # its log may have been rotated since the start
            facts, status.load_s = self._launch.recall()
        else:
            facts, status.load_s = self._startup.facts, seconds
        status.facts = facts.updated(reported)
        self._launch.note(status.facts, status.load_s)
        self._on_ready()
        self._shared.fire(Event.LOADED)

    # Serving

    async def _serve(self, guardian: EngineProcesses, exited: asyncio.Task[int]) -> Failure | None:
        """Keep the engine in the desired state until it exits, fails or is to be stopped."""
        began = asyncio.get_running_loop().time()
        watching = asyncio.create_task(self._watch(guardian))
        keeping = asyncio.create_task(self._keep_adapters())
        try:
            while not exited.done() and not self._shared.stopping:
                if watching.done():
                    return Failure(watching.result())
                change = self._status.changes.next()  # before the step: no later change is missed
                if (failure := await self._step()) is not None:
                    return failure
                await self._shared.wait_for_first(exited, watching, *self._quiet(), change=change)
        finally:
            watching.cancel()
            keeping.cancel()
            self.served_s = asyncio.get_running_loop().time() - began
        return None

    async def _keep_adapters(self) -> None:
        """Load and unload adapters while the engine serves."""
        if not self._launch.lora:
            return
        try:
            await self._adapters.keep()
        except Exception:
            self._logger.exception(": unhandled exception; its adapters stay as they are")

    def _quiet(self) -> list[asyncio.Future[Any]]:
        """Return a future that is done when nothing is in flight, where sleep waits for that."""
        if self._shared.desired is not DesiredState.ASLEEP or not self._client.in_flight:
            return []
        return [asyncio.ensure_future(self._client.wait_idle())]

    async def _step(self) -> Failure | None:
        """Take one step from the actual state to the desired one, if there is one to take."""
        match self._status.state, self._shared.desired:
            case State.READY, DesiredState.DRAINED | DesiredState.ASLEEP:
                self._shared.fire(Event.DRAIN)
            case State.DRAINING, DesiredState.RUNNING:
                self._shared.fire(Event.RESUME)
            case State.DRAINING, DesiredState.ASLEEP if not self._client.in_flight:
                await self._fall_asleep()
            case State.ASLEEP, DesiredState.RUNNING:
                return await self._wake()
        return None

    async def _fall_asleep(self) -> None:
        shared = self._shared
        try:
            await put_to_sleep(self._control, shared.sleep_level, self._measure_gib)
        except SleepFault as fault:
            self._logger.error("failed to enter sleep mode, stopping it: %s", fault)
            self._status.last_error = f"did not fall asleep: {fault}"
            if not shared.released:
                shared.set_desired(DesiredState.STOPPED)
        else:
            shared.fire(Event.SLEPT)

    async def _wake(self) -> Failure | None:
        self._phase = "waking"
        self._shared.fire(Event.START)
        self.load_began = began = asyncio.get_running_loop().time()
        try:
            await wake(self._control, self._shared.sleep_level, self._launch.served_name)
            if self._shared.sleep_level == 2 and self._launch.lora:
                await self._adapters.load_again()
        except (SleepFault, AdapterFault) as fault:
            return Failure(f"did not wake: {fault}")
        finally:
            self._phase = None
        self._status.load_s = asyncio.get_running_loop().time() - began
        self._shared.fire(Event.LOADED)
        return None

    # Watching

    async def _watch(self, guardian: EngineProcesses) -> str:
        """Return the reason when the engine is found dead."""
        monitor = Watchdog(self._launch.spec.progress_timeout_s)
        suspicion = self._shared.suspicion
        for number in itertools.count():
            if number % SAMPLES_PER_MEASUREMENT == 0 and self._status.state is not State.ASLEEP:
                await self._update_memory(guardian)
            sample = await take_sample(guardian, self._probe, self._client)
            if verdict := monitor.verdict(sample):
                return verdict
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(suspicion.wait(), watchdog.SAMPLE_S)
            suspicion.clear()
        raise AssertionError("unreachable")

    async def _update_memory(self, guardian: EngineProcesses) -> None:
        """Find the engine's processes and, unless its memory is declared, measure that."""
        if self._launch.spec.memory_gib is not None:
            await guardian.find_processes()
        elif (gib := await self._measure_gib()) is not None:
            self._status.memory_gib = max(gib, self._status.memory_gib or 0.0)

    async def _measure_gib(self) -> float | None:
        """Return the GiB that the engine holds; None: not known."""
        if self._guardian is None:
            return None
        return await self._host.used_gib(self._guardian)

    # Ending

    async def _finish(
        self, guardian: EngineProcesses, exited: asyncio.Task[int], failure: Failure | None
    ) -> Failure | None:
        """End what is left of the run; return why it failed, None when it was stopped."""
        if exited.done() and failure is None:
            if guardian.lost is not None:
                return Failure(guardian.lost)
            return self._explain_exit(exited.result(), guardian.ended_on)
        if failure is None:
            self._shared.fire(Event.STOP)
            await self._end(guardian, exited, self._shared.grace)
            self._adapters.end_run()
            self._shared.fire(Event.EXIT)
            return None
        self._on_failure(failure)  # requests are refused from here on
        self._client.close()
        await self._end(guardian, exited, 0.0)
        return failure

    async def _retire(self, guardian: EngineProcesses) -> None:
        """End an engine of another configuration once its requests have ended."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RETIRE_S
        exited = asyncio.create_task(guardian.wait(), name=f"guardian of {self._launch.name}")
        try:
            while not self._shared.stopping and loop.time() < deadline:
                if not await self._probe.is_busy():
                    break
                await self._shared.wait_for_first(timeout=PROBE_S)
            await self._end(guardian, exited, self._shared.grace)
        finally:
            exited.cancel()
            guardian.close()  # where the gateway ends first, the next one finds it

    async def _end(
        self, guardian: EngineProcesses, exited: asyncio.Task[int], grace: float
    ) -> None:
        guardian.stop(grace)
        timeout = 0.0 if guardian.frozen else grace + GUARDIAN_SLACK_S
        done, _ = await asyncio.wait({exited}, timeout=timeout)
        if not done:
            self._logger.error(": its guardian does not respond, killing both")
            guardian.kill()
            await asyncio.wait({exited})

    def _explain_exit(self, code: int, node: str | None) -> Failure:
        end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        at = "" if node is None else f" on node {node}"
        if self._status.state is not State.STARTING:
            return Failure(f"it died while serving{at} ({end})")
        self.read_log()
        if (found := self._startup.failure) is None:
            # Its log, which would say why, is on the same disk.
            full = ": No space left on device" if self._launch.disk_is_full() else ""
            return Failure(f"it ended while starting{at} ({end}){full}")
        where = "" if node is None else f" (node {node})"
        return Failure(f"{found}{where}", found.permanent, found.cause)
