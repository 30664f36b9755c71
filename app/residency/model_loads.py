"""Loads on-demand models, and unloads them when others need the memory.

    state       event                                           next        changed by
    UNLOADED    a request or an operator wants it, and it fits  LOADING     `_decide`
    LOADING     an engine is READY                              LOADED      its load task
    LOADING     no engine started; retried after a backoff      UNLOADED    its load task
    LOADED      idle, memory needed, operator; no lease left    UNLOADING   `_decide`
    LOADED      its engines died, and a request wants it        LOADING     `_request_load`
    LOADED      they died again soon after the load             UNLOADING   `_request_load`
    UNLOADING   its engines have stopped                        UNLOADED    its unload task

`policy.decide` chooses, this carries out. It decides again at every event, and at the time that the
latest decision named.

Callers cannot race. All of this runs on one event loop, and a decision is made and begun without an
await in between. LOADING and UNLOADING each belong to one task, and only that task leaves them;
LOADED and UNLOADED are left only by the two methods above, which do not await. A lease is granted
in the step that finds the model LOADED, and a model is unloaded only in a step that finds it
without a lease, from which on it grants none.

Streams do not hold up a model that gives way to another. Those that can be continued are
interrupted (`OnDemandModel.move_streams`): their requests return their leases and wait for the next
load. This is done only if that load is due in time for them (`away_s`), and never for an operator
or an idle model: nothing waits for their memory.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from math import ceil, inf
from typing import Any

from app.errors import EngineUnavailable, out_of_service, shutting_down
from app.residency.model_state import ModelState, OnDemandModel
from app.residency.policy import (
    LoadDecision,
    LoadTerms,
    ModelSnapshot,
    Residency,
    UnloadReason,
    away_s,
    decide,
)
from app.residency.start_waits import ForecastNotifier
from app.telemetry.metrics import Metrics
from engines.background_tasks import BackgroundTasks
from engines.base import ChangeNotifier, Engine, EngineError, EngineState
from engines.logs import ModelLogger
from engines.restarts import GIVEN_UP

log = logging.getLogger(__name__)

# Pause before streams that have begun on a draining model are interrupted as well.
MOVE_POLL_S = 0.25
# uvloop's timers have a resolution of one millisecond, and may fire that much too early.
TIMER_S = 0.002


class ModelLoads:
    """Loads and unloads models as the policy decides; `OnDemandLoader` adds the requests."""

    def __init__(
        self,
        models: Sequence[OnDemandModel],
        metrics: Metrics,
        *,
        engine_changes: ChangeNotifier | None = None,
        budget_gib: float | None = None,
        fixed_gib: Callable[[], float] = lambda: 0.0,
        slots: int = 1,
        terms: LoadTerms | None = None,
    ) -> None:
        """`budget_gib` is for all engines (None: unbounded); `fixed_gib` returns the others' part.

        `slots` models may load at once. `engine_changes` notifies of changes of any engine.
        """
        self._metrics = metrics
        self._budget_gib = budget_gib
        self._fixed_gib = fixed_gib
        self.slots = slots
        self._terms = terms or LoadTerms()
        self._tasks = BackgroundTasks(log)
        self._timer: asyncio.TimerHandle | None = None
        # Notified when an engine has changed, and when a load or an unload has ended.
        self.changes = ForecastNotifier()
        if engine_changes is not None:
            engine_changes.forward_to(self.changes)
        self._closing = False
        self._decision = decide((), inf, 0, 0.0, self._terms)
        self._states = {model.name: ModelState(model=model) for model in models}

    def snapshots(self) -> list[ModelSnapshot]:
        """Return the present state of every model."""
        return [state.snapshot() for state in self._states.values()]

    def replace(self, models: Sequence[OnDemandModel]) -> None:
        """Replace all models; those with the same engines keep their state.

        Requests that wait for a model with new engines wait for those. Leases on old engines end
        as usual; the owner of those engines stops them.
        """
        before, self._states = (
            self._states,
            {model.name: ModelState(model=model) for model in models},
        )
        for name, old in before.items():
            new = self._states.get(name)
            if new is None:
                old.answer(EngineUnavailable(f"the model {name!r} was removed"))
                old.unload_requested = False
            elif new.model.engines == old.model.engines:
                old.model = new.model
                self._states[name] = old
            else:
                new.waiting, new.wanted_since = old.waiting, old.wanted_since
                old.waiting, old.unload_requested = {}, False
        self.changes.notify()
        self.start()

    def start(self) -> None:
        """Note which engines run already, and begin to decide."""
        for state in self._states.values():
            if state.residency is Residency.UNLOADED and state.up:
                self._note_loaded(state)
        self._decide()

    def drain(self) -> None:
        """Load nothing more, and refuse waiting requests: a load may take minutes."""
        self._closing = True
        for state in self._states.values():
            state.answer(shutting_down())

    async def close(self) -> None:
        """Cancel what is under way; engines stay as they are."""
        self.drain()
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.cancel()
        for state in self._states.values():
            state.unload_requested = False
        self.changes.notify()

    def _request_load(self, state: ModelState) -> None:
        """Note that a model which is not available is wanted. Raises EngineUnavailable."""
        name, now = state.model.name, self._now()
        if self._closing:
            raise shutting_down()
        died = state.residency is Residency.LOADED and not state.up
        if died and state.has_failed and (wait_s := state.record_fault(now)):
            self._stop_dead_engines(state, wait_s)
        if now < state.retry_at:
            raise self._backing_off(state)
        if state.wanted_since is None:
            state.wanted_since = now
        if died:
            # Its engines are started again in the memory that they had.
            self._begin_load(state)
        decision = self._decide()
        if name in decision.too_large:
            ModelLogger(log, name).error(
                "does not fit into server.memory_budget_gib: %s", self._memory_text(state)
            )
            error = out_of_service(name, "it does not fit into the memory here")
            state.answer(error)
            raise error

    def _backing_off(self, state: ModelState) -> EngineUnavailable:
        """Return the error for a model that is not loaded before its backoff is over."""
        name = state.model.name
        if state.blocked_by is not None:
            return out_of_service(name, state.blocked_by)
        error = EngineUnavailable(f"the model {name!r} could not be loaded; try again later")
        error.retry_after_s = max(ceil(state.retry_at - self._now()), 1)
        return error

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _capacity_gib(self) -> float:
        return inf if self._budget_gib is None else self._budget_gib - self._fixed_gib()

    def _memory_text(self, state: ModelState) -> str:
        return (
            f"it takes {state.need_gib or 0.0:.1f} GiB, and of {self._budget_gib:g} GiB "
            f"the models that are always loaded leave {self._capacity_gib():.1f}"
        )

    def _decide(self) -> LoadDecision:
        """Decide, and begin what was decided; no await."""
        if self._closing:
            return self._decision
        self._decision = decision = decide(
            self.snapshots(), self._capacity_gib(), self.slots, self._now(), self._terms
        )
        # First: a model that is unloaded now grants no more leases.
        for name, reason in decision.unload:
            self._begin_unload(self._states[name], reason)
        for name, state in self._states.items():
            state.draining = name in decision.draining
            if state.wanted_since is not None and state.available:
                state.answer(None)
        for name in decision.load:
            self._begin_load(self._states[name])
        self._schedule(decision.decide_at)
        for name in decision.draining:
            self._move_streams(self._states[name])
        return decision

    def _move_streams(self, state: ModelState) -> None:
        """Interrupt the streams of a model that gives way, if they can go on in time."""
        settings = state.model.settings
        if state.unload_requested or not settings.continues_streams:
            return
        wait_s = away_s(state.snapshot(), self.snapshots(), self._terms)
        if wait_s is None or wait_s > settings.continuation_wait_s:
            return
        moment = self._now() + MOVE_POLL_S
        if self._timer is None or moment < self._timer.when():
            self._schedule(moment)
        if number := state.model.move_streams():
            event = ": %d streams wait for its next load, in %.0f s at the latest"
            ModelLogger(log, settings.name).info(event, number, wait_s)

    def _schedule(self, moment: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if moment is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(moment + TIMER_S, self._decide)

    def _begin(self, verb: str, state: ModelState, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.start(work, f"{verb} {state.model.name}")

    def _begin_load(self, state: ModelState) -> None:
        state.residency = Residency.LOADING
        state.load_began = self._now()
        ModelLogger(log, state.model.name).info(": loading on demand")
        self._begin("load", state, self._load(state))

    async def _load(self, state: ModelState) -> None:
        """Start the engines of a model, and note the result."""
        # An engine that failed earlier may be waiting for its own restart; it starts afresh.
        failed = [e for e in state.model.engines if e.state is EngineState.FAILED]
        await self._stop_engines(state, failed)
        logger = ModelLogger(log, state.model.name)
        starts = (engine.ensure_ready(inf) for engine in state.model.engines)
        for fault in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(fault, EngineError):
                logger.warning(": an engine did not start: %s", fault)
            elif fault is not None:
                logger.error(": unhandled exception during the load", exc_info=fault)
        if state.up:
            state.load_s = self._now() - state.load_began
            self._metrics.engine_load.observe((state.model.name,), state.load_s)
            logger.info("ready after %.1f s", state.load_s)
            self._note_loaded(state)
        else:
            self._note_failed(state)
            # They would retry by themselves, in memory that is no longer theirs.
            await self._stop_engines(state, state.model.engines)
            state.residency = Residency.UNLOADED
        self.changes.notify()
        self._decide()

    def _note_loaded(self, state: ModelState) -> None:
        state.residency = Residency.LOADED
        state.loaded_at = state.last_used = self._now()
        state.restarts_before = state.restarts
        if state.load_s is None:
            state.load_s = max((e.load_s or 0.0 for e in state.model.engines), default=0.0) or None
        # Before the next decision: a load serves the requests that waited for it in any case.
        state.draining = False
        state.answer(None)

    def _note_failed(self, state: ModelState) -> None:
        wait_s = state.record_fault(self._now())
        state.unload_requested = False
        name, reason = state.model.name, state.reason or "unknown reason"
        faults = (engine.blocked_by for engine in state.model.engines)
        # The backoff here replaces the engine's own limit of restarts.
        state.blocked_by = next((f for f in faults if f not in (None, GIVEN_UP)), None)
        if state.blocked_by is not None:
            state.retry_at = inf
            ModelLogger(log, name).error(
                "cannot be loaded: %s; requests do not load it again, only "
                "`vllm-gateway models load %s` or a reload that changes it",
                reason,
                name,
            )
        else:
            event = "failed to load: %s; next attempt in %g s at the earliest"
            ModelLogger(log, name).error(event, reason, wait_s)
        state.answer(self._backing_off(state))

    def _stop_dead_engines(self, state: ModelState, wait_s: float) -> None:
        """Stop the engines of a model that died again: their supervisors would restart them."""
        ModelLogger(log, state.model.name).error(
            "died again %.0f s after its load: %s; next load in %g s at the earliest",
            self._now() - state.loaded_at,
            state.reason or "unknown reason",
            wait_s,
        )
        state.residency = Residency.UNLOADING
        self._begin("stop", state, self._unload(state))
        state.answer(self._backing_off(state))

    def _begin_unload(self, state: ModelState, reason: UnloadReason) -> None:
        state.residency = Residency.UNLOADING
        if state.up:
            state.failures = 0  # this load has worked
        ModelLogger(log, state.model.name).info(": unloading (%s)", reason)
        self._metrics.model_evictions.add((state.model.name, reason))
        self._begin("unload", state, self._unload(state))

    async def _unload(self, state: ModelState) -> None:
        await self._stop_engines(state, state.model.engines)
        state.residency = Residency.UNLOADED
        state.unload_requested = False
        self.changes.notify()
        self._decide()

    async def _stop_engines(self, state: ModelState, engines: Sequence[Engine]) -> None:
        ends = (e.clear_failed() if e.state is EngineState.FAILED else e.unload() for e in engines)
        for fault in await asyncio.gather(*ends, return_exceptions=True):
            if fault is not None:
                ModelLogger(log, state.model.name).error(": an engine failed to stop: %s", fault)
