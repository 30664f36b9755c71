"""The supervisor of one vLLM server: starts it, restarts it after failures, stops it.

Two states describe an engine. The actual state (`EngineState`, table in `engines.lifecycle`) has
one writer: the task `_supervise`, which runs the engine again and again until it is stopped or
given up. The desired state (`DesiredState`) is written by callers, any of them, at any time; the
latest call wins. The task compares the two and takes one step at a time:

    actual      desired RUNNING   desired DRAINED   desired ASLEEP             desired STOPPED
    no task     start the task    -                 -                          -
    STARTING    continues         continues         continues                  end it → STOPPED
    READY       -                 → DRAINING        → DRAINING                 end it → STOPPED
    DRAINING    → READY           -                 when quiet: → ASLEEP       end it → STOPPED
    ASLEEP      wake → READY      -                 -                          end it → STOPPED
    FAILED      restart, if any   restart, if any   restart, if any            no restart → STOPPED

Callers cannot race, for three reasons. A caller never acts on what it has read: it sets the desired
state and waits for the actual one, so two callers that start an engine wait for one start, and a
start that comes during a drain calls the drain off. Every step of the task reads both states anew
after each wait, and registers for the next change before it reads them, so no change is missed
(see `ChangeNotifier`). And only a stop cannot be called off: while the engine is being stopped, a
start is refused here, and the caller repeats it once the task has ended (`ProcessEngine`
`.ensure_ready`).

A request never waits for the task. It reads `SharedState.accepts`, one attribute that is READY and
RUNNING together, so requests are refused from the moment in which a caller asks for a drain, before
the task has taken note.

Between two runs nothing of the first is left: its guardian confirms that for the processes, the
accelerator's driver for the memory. An engine that the watchdog finds dead is FAILED at once; its
remaining processes are ended after that.
"""

import asyncio
import logging
from collections.abc import Callable

from engines.base import EngineState, EngineStatus, Progress, Start
from engines.http import Http1Client
from engines.lifecycle import Event
from engines.logs import EngineLogger
from engines.output import EngineLog, redact_line
from engines.process.adapter_loader import AdapterLoader
from engines.process.host import EngineHost
from engines.process.launch import Launch
from engines.process.run import EngineRun, Failure
from engines.process.shared_state import DesiredState, SharedState
from engines.restarts import GIVEN_UP, RestartBudget

log = logging.getLogger(__name__)

State = EngineState


class Supervisor:
    """Owns one engine's processes and its state."""

    def __init__(
        self,
        launch: Launch,
        host: EngineHost,
        status: EngineStatus,
        *,
        client: Http1Client,
        control: Http1Client,
        turn: asyncio.Semaphore | None,
        find_adapter_fault: Callable[[str], str | None] = lambda path: None,
    ) -> None:
        """`client` carries requests, `control` the gateway's own, which do not count as in flight.

        `turn` is held while the engine loads. `find_adapter_fault` returns why an adapter cannot be
        loaded from a path; it may block.
        """
        self.shared = SharedState(status, launch.spec.sleep_level or 1)
        self._status = status
        self._launch = launch
        self._logger = EngineLogger(log, launch.name)
        self._host = host
        self._client = client
        self.control = control
        self._turn = turn
        self._log = EngineLog(launch.log)
        self._adapters = AdapterLoader(launch.name, status, control, find_adapter_fault)
        self._budget = RestartBudget(launch.spec.restart)
        self._task: asyncio.Task[None] | None = None
        self._run: EngineRun | None = None  # the present one, else the latest
        self.failures = 0
        # The reason why no restart follows, in words that clients may read.
        self.blocked_by: str | None = None
        # It was READY once, so its configuration works.
        self._has_served = False
        self._served_s = 0.0  # in all earlier runs
        # Why the latest start failed, if it did: the next one has no known duration.
        self._failed_start: Failure | None = None
        # The moment of the next restart, in the loop's time.
        self._restart_at = 0.0
        # An engine that was given up is not started before this moment; after it, the next request
        # for RUNNING starts it. `renew_budget` ends the pause.
        self._not_before = 0.0
        # The engine is being ended by `clear_failed`: it stays FAILED.
        self._clearing = False

    # For callers

    @property
    def alive(self) -> bool:
        """True while the task runs: an actual state that is not the desired one will change."""
        return self._task is not None and not self._task.done()

    @property
    def pid(self) -> int | None:
        """The API server's process, while there is one."""
        return None if self._run is None else self._run.pid

    @property
    def progress(self) -> Progress | None:
        if self._run is None or self._status.state is not State.STARTING:
            return None
        return self._run.progress

    @property
    def starting(self) -> Start | None:
        """See `engines.base.Engine`."""
        shared, status, failed = self.shared, self._status, self._failed_start
        if shared.desired is not DesiredState.RUNNING or not self.alive:
            return None
        if failed is not None and not self._next_may_succeed(failed):
            return None
        after_failure = failed is not None
        load_s = None if after_failure else status.load_s
        now = asyncio.get_running_loop().time()
        began = None if self._run is None else self._run.load_began
        if status.state is State.STARTING and began is not None:
            return Start(now - began, load_s, after_failure)
        if status.state in (State.STOPPED, State.STARTING, State.FAILED):
            pause_s = max(self._restart_at - now, 0.0)
            return Start(0.0, None if load_s is None else pause_s + load_s, after_failure)
        return None

    def request(self, desired: DesiredState, *, sleep_level: int | None = None) -> None:
        """Set the desired state. A start during a stop is ignored: repeat it after the stop."""
        shared = self.shared
        if shared.released:
            return
        if desired is DesiredState.RUNNING and shared.stopping and self.alive:
            return
        shared.sleep_level = sleep_level or shared.sleep_level
        if desired is DesiredState.RUNNING and not self.alive and self._may_start():
            self._task = asyncio.create_task(self._supervise(), name=f"engine {self._launch.name}")
            self._task.add_done_callback(lambda _: shared.notify())  # `alive` has changed
        shared.set_desired(desired)

    def renew_budget(self) -> None:
        """Let an engine that was given up start at once, with a new restart budget."""
        self._not_before = 0.0
        self._budget.renew()

    async def wait_until_stopped(self) -> None:
        """Return when the task has ended; a FAILED engine is STOPPED then."""
        await self._join()
        if self._status.state is State.FAILED and not self.shared.released:
            self.shared.fire(Event.STOP)

    async def clear_failed(self) -> None:
        """End what is left of an engine that failed; it stays FAILED until it is started."""
        self._clearing = True
        self.request(DesiredState.STOPPED)
        await self._join()
        self.renew_budget()

    async def release(self) -> None:
        """Leave the engine running for the next gateway; requests in flight go on."""
        self.shared.released = True
        if self._task is not None:
            self._task.cancel()
        await self._join()

    def recent_log(self) -> list[str]:
        """Return the newest lines of the engine's output."""
        if self._run is None:
            self._log.read()
        else:
            self._run.read_log()
        return self._log.lines()

    def _next_may_succeed(self, failed: Failure) -> bool:
        """Return whether a start may succeed as it is after one that failed so."""
        return self._has_served and not failed.permanent and not failed.no_place

    def _may_start(self) -> bool:
        return asyncio.get_running_loop().time() >= self._not_before

    async def _join(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task})

    # The owner of the state

    async def _supervise(self) -> None:
        """Run the engine again and again until it is stopped or given up."""
        status = self._status
        try:
            while (failure := await self._run_once()) is not None:
                self._set_failed(failure)
                self._logger.error("failed: %s", status.last_error)
                if not await self._wait_for_restart(failure):
                    break
                status.restarts += 1
        except Exception:
            self._logger.exception("failed: unhandled exception in the gateway")
            if status.state not in (State.STOPPED, State.FAILED):
                status.state = State.FAILED
            status.last_error = "unhandled exception in the gateway; its log has the traceback"
            self.shared.notify()

    async def _run_once(self) -> Failure | None:
        """Run the engine once; return why it failed, None when it was stopped."""
        self._clearing = False
        self.blocked_by = None
        self._run = run = EngineRun(
            self._launch,
            self._host,
            self.shared,
            client=self._client,
            control=self.control,
            adapters=self._adapters,
            engine_log=self._log,
            turn=self._turn,
            on_ready=self._on_ready,
            on_failure=self._set_failed,
        )
        failure = await run.execute()
        self._served_s += run.served_s
        return failure

    def _on_ready(self) -> None:
        self._has_served = True
        self._failed_start = None

    def _set_failed(self, failure: Failure) -> None:
        status = self._status
        if status.state is State.FAILED:
            return
        self._failed_start = failure if status.state is State.STARTING else None
        if failure.permanent and not self._has_served:
            self.blocked_by = failure.cause.words
        self.failures += 1
        status.last_error = redact_line(failure.reason)
        self.shared.fire(Event.FAIL)

    async def _wait_for_restart(self, failure: Failure) -> bool:
        """Wait for the backoff of a restart; return False when there will be none."""
        loop, restart = asyncio.get_running_loop(), self._launch.spec.restart
        if failure.no_place or ((failure.permanent or failure.of_disk) and self._has_served):
            # Its configuration works: an unmounted disk may be mounted again, a full one have room,
            # a node come back.
            wait: float | None = restart.max_backoff_s
        else:
            wait = None if failure.permanent else self._budget.next(self._served_s)
        if wait is None:
            self._not_before = loop.time() + restart.max_backoff_s
            if not failure.permanent:
                self.blocked_by = GIVEN_UP
                self._logger.error(
                    "given up after %d restarts in %g s of service; "
                    "`vllm-gateway models load` starts it again",
                    restart.budget,
                    restart.window_s,
                )
            return False
        self._logger.info("restarts in %g s", wait)
        self._restart_at = until = loop.time() + wait
        while not self.shared.stopping and (left := until - loop.time()) > 0:
            await self.shared.wait_for_first(timeout=left)
        if self.shared.stopping:
            if not self._clearing:
                self.shared.fire(Event.STOP)
            return False
        return True
