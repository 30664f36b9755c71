"""The life of one vLLM server: started, watched, restarted, put to sleep, ended.

One task, `_live`, does all of it and is the only writer of the state. Everybody else says what is
wanted and waits for the state that follows. Between two runs nothing of the first is left: its
guardian proves that for the processes, the accelerator's door for the memory.
"""

import asyncio
import contextlib
import enum
import itertools
import logging
import signal
from dataclasses import dataclass
from math import inf
from typing import Any

from engines.base import EngineState, EngineStatus, Progress, Start
from engines.guard.guardian_client import GuardianClient, LaunchError, find_guardian, start_guardian
from engines.http.client import Address, Http1Client
from engines.http.probe import Probe
from engines.lifecycle import Event
from engines.output import redact
from engines.output.failure import Cause
from engines.output.log import EngineLog
from engines.output.startup import StartupLog
from engines.process.launch import Launch
from engines.process.sleep_mode import SleepFault, put_to_sleep, wake
from engines.process.watchdog import LOOK_S, Sample, Watchdog, stopped, take_sample
from engines.restarts import GIVEN_UP, RestartBudget

log = logging.getLogger(__name__)

PROBE_S = 0.2
# Once a minute the engine's processes are looked for, among all of the machine's, and weighed:
# reading what a large one holds is work for the kernel.
WEIGH_LOOKS = 12
# A guardian reports within its own sweep bound after the grace; later than this it is stuck.
GUARDIAN_SLACK_S = 15.0
# How long an engine that another configuration started may finish what it is at.
RETIRE_S = 30.0

State = EngineState


class DesiredState(enum.Enum):
    """What an engine is to be; the supervisor goes there."""

    RUNNING = enum.auto()
    DRAINED = enum.auto()
    ASLEEP = enum.auto()
    STOPPED = enum.auto()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ended that was not asked to."""

    reason: str
    # Starting again without a change will not help.
    lasting: bool = False
    cause: Cause = Cause.OTHER


class Supervisor:
    """Owns one engine's processes and its state."""

    def __init__(
        self,
        launch: Launch,
        client: Http1Client,
        status: EngineStatus,
        turn: asyncio.Semaphore | None,
    ) -> None:
        """`client` carries requests; `turn` is taken while the engine loads."""
        self.status = status
        self._launch = launch
        self._client = client
        # Its own connections: questions of ours are not requests in flight.
        self.control = Http1Client(Address(uds=str(launch.socket)), launch.spec.timeouts)
        self._probe = Probe(self.control)
        self._turn = turn
        self._log = EngineLog(launch.directory / "engine.log")
        self._startup = StartupLog()
        self._restarts = RestartBudget(launch.spec.restart)
        self.wanted = DesiredState.STOPPED
        # READY and wanted so: requests are taken.
        self.accepts = False
        self.failures = 0
        self.grace = 0.0
        # Why nothing starts it any more, in words that clients may read.
        self.blocked_by: str | None = None
        self._served = False  # it was READY once, so what it runs with can be run
        # Since when it loads or wakes, in the loop's time; None: it waits for that.
        self._load_began: float | None = None
        self._restart_at = 0.0
        # The last start came to nothing, so the next one promises nothing.
        self._start_failed = False
        self._resting = False
        self._served_s = 0.0  # in all its runs
        self._level: int = launch.spec.sleep_level or 1
        self._released = False
        self._link: GuardianClient | None = None
        self._phase: str | None = None
        self._task: asyncio.Task[None] | None = None
        # When an engine that was given up may be tried again.
        self._not_before = 0.0
        self._suspicion = asyncio.Event()

    # What others read and ask

    @property
    def alive(self) -> bool:
        """Whether somebody works on it: a state that is not as wanted will change by itself."""
        return self._task is not None and not self._task.done()

    @property
    def pid(self) -> int | None:
        """The API server's process, while there is one."""
        return None if self._link is None else self._link.engine_pid

    @property
    def progress(self) -> Progress | None:
        if self.status.state is not State.STARTING:
            return None
        return Progress(self._phase) if self._phase else self._startup.progress

    @property
    def starting(self) -> Start | None:
        """See `engines.base.Engine`."""
        if self.wanted is not DesiredState.RUNNING or not self.alive or self._start_failed:
            return None
        now = asyncio.get_running_loop().time()
        if self.status.state is State.STARTING and self._load_began is not None:
            return Start(now - self._load_began, self.status.load_s)
        if self.status.state in (State.STOPPED, State.STARTING, State.FAILED):
            pause_s = max(self._restart_at - now, 0.0)
            return Start(0.0, None if self.status.load_s is None else pause_s + self.status.load_s)
        return None

    def want(self, wanted: DesiredState, *, level: int | None = None) -> None:
        """Say what the engine is to be."""
        if self._released:
            return
        if wanted is DesiredState.RUNNING and self.wanted is DesiredState.STOPPED and self.alive:
            return  # it is being ended; who wants it started asks again after that
        self.wanted = wanted
        self._level = level or self._level
        if wanted is DesiredState.RUNNING and not self.alive and self.may_start:
            self._task = asyncio.create_task(self._live(), name=f"engine {self._launch.name}")
            self._task.add_done_callback(lambda _: self._notify())  # `alive` has changed
        self._notify()

    @property
    def may_start(self) -> bool:
        """Whether an engine that does not run may be started now."""
        return asyncio.get_running_loop().time() >= self._not_before

    def renew(self) -> None:
        """Let an engine that was given up be started at once, with a new budget."""
        self._not_before = 0.0
        self._restarts.renew()

    def suspect(self) -> None:
        """Look at the engine at once: a request found it odd."""
        self._suspicion.set()

    async def over(self) -> None:
        """Return when nobody works on it any more."""
        if self._task is not None:
            await asyncio.wait({self._task})
        if self.status.state is State.FAILED and not self._released:
            self._fire(Event.STOP)

    async def rest(self) -> None:
        """End what is left of an engine that failed: it stays FAILED until it is asked for."""
        self._resting = True
        self.want(DesiredState.STOPPED)
        if self._task is not None:
            await asyncio.wait({self._task})
        self.renew()

    def recent_log(self) -> list[str]:
        """Return the newest lines of the engine's output."""
        self._read_log()
        return self._log.lines()

    async def release(self) -> None:
        """Let go of the engine for good, without ending it; requests in flight go on."""
        self._released = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    # The owner of the state

    def _fire(self, event: Event) -> None:
        self.status.fire(event)
        self._update_accepts()

    def _update_accepts(self) -> None:
        self.accepts = self.status.state is State.READY and self.wanted is DesiredState.RUNNING

    def _notify(self) -> None:
        self._update_accepts()
        self.status.changes.notify()

    async def _first(
        self,
        *futures: asyncio.Future[Any],
        timeout: float | None = None,
        change: asyncio.Future[None] | None = None,
    ) -> None:
        """Return when a future is done, at a change (default: the next), or after `timeout`."""
        change = change or self.status.changes.next()
        try:
            waited = {change, *futures}
            await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()

    async def _live(self) -> None:
        """Run the engine, again and again, until it is stopped or given up."""
        try:
            while (failure := await self._run()) is not None:
                self._fail(failure)
                if not await self._again(failure):
                    break
                self.status.restarts += 1
        except Exception:
            log.exception("engine %s: a fault of the gateway's own", self._launch.name)
            if self.status.state not in (State.STOPPED, State.FAILED):
                self.status.state = State.FAILED
            self.status.last_error = "a fault of the gateway's own; its log has the trace"
            self._notify()

    def _fail(self, failure: Failure) -> None:
        self._refuse(failure)
        log.error("engine %s failed: %s", self._launch.name, self.status.last_error)

    def _refuse(self, failure: Failure) -> None:
        if self.status.state is not State.FAILED:
            self._start_failed = self.status.state is State.STARTING
            if failure.lasting and not self._served:
                self.blocked_by = failure.cause.words
            self.failures += 1
            self.status.last_error = redact.hidden(failure.reason)
            self._fire(Event.FAIL)

    async def _again(self, failure: Failure) -> bool:
        """Wait as long as a restart has to; return False when there will be none."""
        loop, restart = asyncio.get_running_loop(), self._launch.spec.restart
        if failure.lasting and self._served:
            # It could be run before: a disk that went away may come back.
            wait: float | None = restart.max_backoff_s
        else:
            wait = None if failure.lasting else self._restarts.next(self._served_s)
        if wait is None:
            self._not_before = loop.time() + restart.max_backoff_s
            if not failure.lasting:
                self.blocked_by = GIVEN_UP
                log.error(
                    "engine %s is given up after %d restarts in %g s of service; "
                    "`vllm-gateway models load` starts it again",
                    *(self._launch.name, restart.budget, restart.window_s),
                )
            return False
        log.info("engine %s: starting again in %g s", self._launch.name, wait)
        self._restart_at = until = loop.time() + wait
        while self.wanted is not DesiredState.STOPPED and (left := until - loop.time()) > 0:
            await self._first(timeout=left)
        if self.wanted is DesiredState.STOPPED:
            if not self._resting:
                self._fire(Event.STOP)
            return False
        return True

    async def _run(self) -> Failure | None:
        """Run the engine once; return why it failed, None when it was stopped."""
        self._resting = False
        self.blocked_by = None
        self._load_began = None
        self._fire(Event.START)
        self._startup = StartupLog()
        self._phase = "looking for an engine that runs"
        async with contextlib.AsyncExitStack() as turn:
            # Before the first wait: engines load in the order in which they are started.
            taking = self._queue_for_turn(turn)
            link = await find_guardian(self._launch.directory)
            if link is not None and link.fingerprint != self._launch.fingerprint:
                self._phase = "ending the engine of another configuration"
                await self._retire(link)
                link = None
            adopted = link is not None
            if adopted:
                await turn.aclose()
            if link is None:
                self._phase = "waiting for its turn"
                if not await self._has_turn(taking):
                    self._fire(Event.STOP)
                    self._fire(Event.EXIT)
                    return None
                self._phase = "starting processes"
                if self.status.load_s is None:  # what an earlier gateway measured is the best guess
                    _, self.status.load_s = self._launch.recall()
                try:
                    link = await self._spawn()
                except (OSError, LaunchError) as error:
                    missing = self._launch.spec.missing_model() is not None
                    cause = Cause.MISSING_FILES if missing else Cause.OTHER
                    return Failure(str(error), lasting=True, cause=cause)
            self._link = link
            self._phase = None
            link.keep(self._launch.keep)
            gone = asyncio.create_task(link.wait(), name=f"guardian of {self._launch.name}")
            try:
                if adopted:
                    log.info("engine %s: taken over, pid %d", self._launch.name, link.engine_pid)
                failure = await self._until_up(link, gone, adopted=adopted)
                await turn.aclose()
                if failure is None and self.status.state is State.READY:
                    began = asyncio.get_running_loop().time()
                    failure = await self._serve(link, gone)
                    self._served_s += asyncio.get_running_loop().time() - began
                failure = await self._finish(link, gone, failure)
                await self._launch.memory.until_free(link.pids)
                return failure
            finally:
                self._link = None
                gone.cancel()
                self.control.close()
                if self._released:  # what it does for others goes on
                    link.close()
                else:
                    self._client.close()
                    await self._bury(link, gone)

    async def _bury(self, link: GuardianClient, gone: asyncio.Task[int]) -> None:
        """End what this task leaves behind when it is cancelled or breaks."""
        if not gone.done() or gone.cancelled():
            link.kill()

    def _queue_for_turn(self, stack: contextlib.AsyncExitStack) -> asyncio.Future[Any] | None:
        """Queue for the turn to load; the stack gives back the turn, or the place in the queue."""
        turn = self._turn
        if turn is None:
            return None
        taking = asyncio.ensure_future(turn.acquire())

        def give_back() -> None:
            if taking.done() and not taking.cancelled():
                turn.release()
            else:
                taking.cancel()

        stack.callback(give_back)
        return taking

    async def _has_turn(self, taking: asyncio.Future[Any] | None) -> bool:
        """Wait until the engine may load; return False when it is stopped before."""
        while self.wanted is not DesiredState.STOPPED and taking is not None and not taking.done():
            await self._first(taking)
        return self.wanted is not DesiredState.STOPPED

    async def _spawn(self) -> GuardianClient:
        launch = self._launch
        environment = launch.prepare()
        if self._log.path.exists():
            self._log.path.replace(self._log.path.with_suffix(".log.previous"))
        await launch.memory.note_before()
        return await start_guardian(
            launch.directory,
            launch.command,
            environment,
            fingerprint=launch.fingerprint,
            keep=launch.keep,
        )

    async def _until_up(
        self, link: GuardianClient, gone: asyncio.Task[int], *, adopted: bool
    ) -> Failure | None:
        """Return when the engine is READY, gone, or told to stop; a failure when it never will be.

        That is when it is too late, or one of its processes stands still.
        """
        loop = asyncio.get_running_loop()
        began, patience = loop.time(), self._launch.spec.start_timeout_s
        self._load_began = began
        judge, next_look = Watchdog(inf), began
        while self.wanted is not DesiredState.STOPPED:
            self._read_log()
            if self._launch.socket.exists() and await self._probe.healthy():
                await self._loaded(loop.time() - began, adopted=adopted)
                return None
            if gone.done():
                return None
            if (now := loop.time()) - began >= patience:
                return Failure(f"not ready after {patience:g} s (start_timeout_s)")
            if now >= next_look:
                next_look = now + LOOK_S
                standing = stopped((await link.find_processes()).items())
                if verdict := judge.verdict(Sample(now, standing, 200, 0.0, None)):
                    return Failure(verdict)
            await self._first(gone, timeout=PROBE_S)
        return None

    async def _loaded(self, seconds: float, *, adopted: bool) -> None:
        """Put down what is known of the engine now that it is up."""
        told = await self._probe.facts()
        self._read_log()
        if adopted:  # its log may have begun anew since
            facts, self.status.load_s = self._launch.recall()
        else:
            facts, self.status.load_s = self._startup.facts, seconds
        self.status.facts = facts.updated(told)
        self._launch.note(self.status.facts, self.status.load_s)
        self._served = True
        self._start_failed = False
        self._fire(Event.LOADED)

    async def _serve(self, link: GuardianClient, gone: asyncio.Task[int]) -> Failure | None:
        """Keep the engine as it is wanted until it has to end."""
        watching = asyncio.create_task(self._watch(link))
        try:
            while not gone.done() and self.wanted is not DesiredState.STOPPED:
                if watching.done():
                    return Failure(watching.result())
                change = self.status.changes.next()  # before the step: no later change is missed
                if (failure := await self._approach()) is not None:
                    return failure
                await self._first(gone, watching, *self._quiet(), change=change)
        finally:
            watching.cancel()
        return None

    def _quiet(self) -> list[asyncio.Future[Any]]:
        """Return what is done when nothing is in flight, where that is waited for."""
        if self.wanted is not DesiredState.ASLEEP or not self._client.in_flight:
            return []
        return [asyncio.ensure_future(self._client.quiet())]

    async def _approach(self) -> Failure | None:
        """Go one step from the state towards what is wanted, if there is one to go."""
        match self.status.state, self.wanted:
            case State.READY, DesiredState.DRAINED | DesiredState.ASLEEP:
                self._fire(Event.DRAIN)
            case State.DRAINING, DesiredState.RUNNING:
                self._fire(Event.RESUME)
            case State.DRAINING, DesiredState.ASLEEP if not self._client.in_flight:
                await self._fall_asleep()
            case State.ASLEEP, DesiredState.RUNNING:
                return await self._wake()
        return None

    async def _fall_asleep(self) -> None:
        try:
            await put_to_sleep(self.control, self._level, self._held)
        except SleepFault as fault:
            log.error("engine %s is ended instead of asleep: %s", self._launch.name, fault)
            self.status.last_error = f"did not fall asleep: {fault}"
            self.want(DesiredState.STOPPED)
        else:
            self._fire(Event.SLEPT)

    async def _wake(self) -> Failure | None:
        self._phase = "waking"
        self._fire(Event.START)
        self._load_began = began = asyncio.get_running_loop().time()
        try:
            await wake(self.control, self._level, self._launch.served_name)
        except SleepFault as fault:
            return Failure(f"did not wake: {fault}")
        finally:
            self._phase = None
        self.status.load_s = asyncio.get_running_loop().time() - began
        self._fire(Event.LOADED)
        return None

    async def _held(self) -> float | None:
        """Return the GiB that the engine holds, None where nobody knows."""
        if self._link is None:
            return None
        # Looked for anew: of an engine that was taken over only the API server is known at first.
        return await self._launch.memory.held_gib(await self._link.find_processes())

    async def _weigh(self, link: GuardianClient) -> None:
        """Learn which processes the engine has and, where nobody has declared it, what it takes."""
        if self._launch.spec.memory_gib is not None:
            await link.find_processes()
        elif (held := await self._held()) is not None:
            self.status.memory_gib = max(held, self.status.memory_gib or 0.0)

    async def _watch(self, link: GuardianClient) -> str:
        """Return why the engine is dead once it is."""
        judge = Watchdog(self._launch.spec.progress_timeout_s)
        for number in itertools.count():
            if number % WEIGH_LOOKS == 0 and self.status.state is not State.ASLEEP:
                await self._weigh(link)
            look = await take_sample(link, self._probe, self._client)
            if verdict := judge.verdict(look):
                return verdict
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._suspicion.wait(), LOOK_S)
            self._suspicion.clear()
        raise AssertionError("nobody counts that far")

    async def _finish(
        self, link: GuardianClient, gone: asyncio.Task[int], failure: Failure | None
    ) -> Failure | None:
        """End what is left of a run; return why it failed, None when it was stopped."""
        if gone.done() and failure is None:
            return self._why(gone.result())
        if failure is None:
            self._fire(Event.STOP)
            await self._end(link, gone, self.grace)
            self._fire(Event.EXIT)
            return None
        self._refuse(failure)  # from here on, while what is left of it is ended
        self._client.close()
        await self._end(link, gone, 0.0)
        return failure

    async def _retire(self, link: GuardianClient) -> None:
        """End an engine that another configuration started, once it has done what it is at."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RETIRE_S
        while self.wanted is not DesiredState.STOPPED and loop.time() < deadline:
            if not await self._probe.busy():
                break
            await self._first(timeout=PROBE_S)
        await self._end(link, asyncio.create_task(link.wait()), self.grace)

    async def _end(self, link: GuardianClient, gone: asyncio.Task[int], grace: float) -> None:
        link.stop(grace)
        patience = 0.0 if link.frozen else grace + GUARDIAN_SLACK_S
        done, _ = await asyncio.wait({gone}, timeout=patience)
        if not done:
            log.error("engine %s: its guardian does not answer", self._launch.name)
            link.kill()
            await asyncio.wait({gone})

    def _read_log(self) -> None:
        for line in self._log.read():
            self._startup.feed(line)

    def _why(self, code: int) -> Failure:
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if self.status.state is not State.STARTING:
            return Failure(f"it died while serving ({ended})")
        self._read_log()
        if (told := self._startup.failure) is None:
            return Failure(f"it ended while starting ({ended})")
        return Failure(str(told), told.lasting, told.cause)
