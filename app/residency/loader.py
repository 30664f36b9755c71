"""Models on demand: loaded when a request comes, unloaded when others need the memory.

The keeper does what the policy decides, and lets requests wait meanwhile. It decides again at each
event, and at the moment that the last decision named. One task at a time loads or unloads a model;
only that task and the keeper's own methods write its residency.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, inf

from app.errors import EngineOverloaded, EngineUnavailable, GatewayError, out_of_service
from app.residency.entry import Entry, Given, OnDemand
from app.residency.forecast import UP, Forecast, remaining_s
from app.residency.model_lease import ModelLease
from app.residency.policy import SLACK_GIB, Decision, LoadTerms, Reason, Residency, Resident, decide
from app.residency.start_waits import ForecastNotifier
from app.telemetry.metrics import Metrics
from engines.base import ChangeNotifier, Engine, EngineError, EngineState
from engines.restarts import GIVEN_UP

log = logging.getLogger(__name__)

SHUTTING_DOWN = "the gateway is shutting down; try again"
# What to tell a client where nothing is known of a load: as long again, within these bounds.
MIN_GUESS_S, MAX_GUESS_S = 5.0, 60.0
# uvloop's timers have a resolution of a millisecond and may be early by one.
TIMER_S = 0.002


class OnDemandLoader:
    """Loads and unloads the models on demand."""

    def __init__(
        self,
        models: Sequence[OnDemand],
        metrics: Metrics,
        *,
        engine_changes: ChangeNotifier | None = None,
        budget_gib: float | None = None,
        fixed_gib: Callable[[], float] = lambda: 0.0,
        slots: int = 1,
        terms: LoadTerms | None = None,
    ) -> None:
        """`budget_gib` is for all engines (None: no bound), `fixed_gib` what the others take of it.

        `slots` models may load at once. `engine_changes` is the event of any engine's changes.
        """
        self._metrics = metrics
        self._budget_gib = budget_gib
        self._fixed_gib = fixed_gib
        self.slots = slots
        self._terms = terms or LoadTerms()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        # Whenever an engine has changed, and a load or an unload has ended.
        self.changes = ForecastNotifier()
        if engine_changes is not None:
            engine_changes.forward_to(self.changes)
        self._draining = False
        self._decided = decide((), inf, 0, 0.0, self._terms)
        self._entries = {model.name: Entry(model) for model in models}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def waiting(self) -> int:
        """How many requests wait for a model."""
        return sum(len(entry.waiting) for entry in self._entries.values())

    def residents(self) -> list[Resident]:
        """Return how things stand with each model."""
        return [entry.resident() for entry in self._entries.values()]

    def resident(self, name: str) -> Resident | None:
        """Return how things stand with a model; None: it is not on demand."""
        entry = self._entries.get(name)
        return None if entry is None else entry.resident()

    def loading_s(self, name: str) -> float | None:
        """Return for how long a model has been loading or waiting for its load; None: it is not."""
        entry = self._entries.get(name)
        if entry is None or self._draining or self._now() < entry.retry_at:
            return None
        if entry.residency is Residency.LOADING:
            return self._now() - entry.load_began
        return None if entry.wanted_since is None else self._now() - entry.wanted_since

    def forecast(self, name: str) -> Forecast | None:
        """Return when a model can serve; None: no request has it loaded now."""
        entry = self._entries.get(name)
        if entry is None or self._draining:
            return None
        if entry.open:
            return UP
        now, expected_s = self._now(), entry.expected_s
        if now < entry.retry_at:  # also while what is left of its load is ended
            return None
        if entry.residency is Residency.LOADING:
            return Forecast(remaining_s(now - entry.load_began, expected_s))
        if (entry.need_gib or 0.0) > self._room_gib() + SLACK_GIB:
            return None
        begins_in_s = self._decided.starts_in_s.get(name, 0.0)
        in_s = None if expected_s is None else begins_in_s + expected_s
        return Forecast(in_s, cold=entry.wanted_since is None)

    async def hold(
        self, name: str, *, yields: Callable[[], bool] | None = None, bound_s: float = inf
    ) -> ModelLease:
        """Return a hold on a model once it is loaded; await it in the `with` that ends it.

        It waits for `load_wait_s` of the model at most, and for `bound_s`; it also leaves, and has
        the model loaded all the same, when `yields` says that another model serves the request.
        Raises EngineOverloaded where the wait is or would be too long or too many wait, and
        EngineUnavailable where the model cannot be loaded.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise EngineUnavailable(f"the model {name!r} was replaced just now; try again")
        if entry.open:
            entry.holds += 1
            return ModelLease(partial(self._leave, entry), None)
        settings = entry.model.settings
        self._want(entry)
        if not entry.open:
            if yields is not None and yields():
                raise self._yielded(entry)
            least_s = self._least_wait_s(entry)
            if least_s > settings.load_wait_s:
                raise self._overloaded(entry, "takes longer to load than a request may wait")
            if len(entry.waiting) >= settings.queue.max_waiting:
                raise self._overloaded(entry, "has as many requests waiting for it as it may")
        return await self._wait(entry, min(settings.load_wait_s, bound_s), yields)

    async def load(self, name: str) -> None:
        """Load a model for an operator, and return when it is loaded.

        Raises KeyError for one that is not on demand, and EngineUnavailable with the reason.
        """
        entry = self._entries[name]
        entry.retry_at, entry.failures, entry.blocked_by = 0.0, 0, None
        if entry.open:
            return
        self._want(entry)
        try:
            with await self._wait(entry, inf):
                pass
        except EngineUnavailable as error:
            raise EngineUnavailable(entry.reason or error.message) from None

    async def unload(self, name: str) -> None:
        """Unload a model for an operator, and return when that is done.

        Its requests in flight end first; new ones wait meanwhile, and have it loaded again. Raises
        KeyError for one that is not on demand.
        """
        entry = self._entries[name]
        if entry.residency is Residency.UNLOADED:
            return
        entry.asked_out = True
        self._decide()
        await self.changes.wait_for(lambda: not entry.asked_out)

    def replace(self, models: Sequence[OnDemand]) -> None:
        """Have other models from now on; those with the same engines stay as they are.

        Who waits for one that has new engines waits for those. What the old ones hold ends without
        the keeper: their owner stops them.
        """
        before, self._entries = self._entries, {model.name: Entry(model) for model in models}
        for name, old in before.items():
            new = self._entries.get(name)
            if new is None:
                old.answer(EngineUnavailable(f"the model {name!r} was removed"))
            elif new.model.engines == old.model.engines:
                old.model = new.model
                self._entries[name] = old
            else:
                new.waiting, new.wanted_since = old.waiting, old.wanted_since
                old.waiting, old.asked_out = {}, False
        self.changes.notify()
        self.start()

    def start(self) -> None:
        """Take note of engines that run already, and begin to decide."""
        for entry in self._entries.values():
            if entry.residency is Residency.UNLOADED and entry.up:
                self._note_loaded(entry)
        self._decide()

    def drain(self) -> None:
        """Load nothing more; refuse those who wait for a load, which may take minutes."""
        self._draining = True
        for entry in self._entries.values():
            entry.answer(EngineUnavailable(SHUTTING_DOWN))

    async def close(self) -> None:
        """End what is under way; engines are left as they are."""
        self.drain()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for entry in self._entries.values():
            entry.asked_out = False
        self.changes.notify()

    # Requests

    def _want(self, entry: Entry) -> None:
        """Note that somebody wants a model that is not open. Raises EngineUnavailable."""
        name, now = entry.model.name, self._now()
        if self._draining:
            raise EngineUnavailable(SHUTTING_DOWN)
        died = entry.residency is Residency.LOADED and not entry.up
        if died and (wait_s := entry.note_fault(now)):
            self._begin_rest(entry, wait_s)
        if now < entry.retry_at:
            raise self._resting(entry)
        if entry.wanted_since is None:
            entry.wanted_since = now
        if died:
            # Its engines have ended. They are started again in the memory that they had.
            self._begin_load(entry)
        decision = self._decide()
        if name in decision.too_large:
            log.error(
                "model %s does not fit into server.memory_budget_gib: %s", name, self._sum(entry)
            )
            error = out_of_service(name, "it does not fit into the memory here")
            entry.answer(error)
            raise error

    async def _wait(
        self, entry: Entry, bound_s: float, yields: Callable[[], bool] | None = None
    ) -> ModelLease:
        """Return a hold once there is one. Cancelled, it leaves without."""
        loop = asyncio.get_running_loop()
        name, began = entry.model.name, loop.time()
        given: Given = loop.create_future()
        entry.waiting[given] = None
        if entry.open:
            entry.answer(None)
        timeout = None if bound_s == inf else loop.call_later(bound_s, self._give_up, name, given)
        change: asyncio.Future[None] | None = None

        def reconsider(_: object = None) -> None:
            nonlocal change
            if yields is None or given.done():
                return
            if yields():
                left = self._entries[name]
                del left.waiting[given]
                given.set_result(self._yielded(left))
            else:
                change = self.changes.next()
                change.add_done_callback(reconsider)

        reconsider()
        self._metrics.queue_depth.add((name,), 1)
        try:
            told = await given
        except BaseException:
            if given.done() and not given.cancelled():
                if isinstance(held := given.result(), Entry):
                    self._leave(held)
            else:
                self._forget(name, given)
            raise
        finally:
            for waited in (timeout, change):
                if waited is not None:
                    waited.cancel()
            self._metrics.queue_depth.add((name,), -1)
            self._metrics.queue_wait.observe((name,), loop.time() - began)
        if isinstance(told, GatewayError):
            raise told
        return ModelLease(partial(self._leave, told), loop.time() - began)

    def _give_up(self, name: str, given: Given) -> None:
        """Refuse a request that has waited too long; the model stays wanted."""
        if not given.done():
            entry = self._entries[name]  # that of a model that was removed has answered
            bound_s = entry.model.settings.load_wait_s
            given.set_result(self._overloaded(entry, f"was not loaded within {bound_s:g} s"))
            del entry.waiting[given]

    def _yielded(self, entry: Entry) -> EngineUnavailable:
        """Return the refusal of a request that another model serves; this one stays wanted."""
        entry.promised = True
        error = EngineUnavailable(f"the model {entry.model.name!r} is loading")
        error.retry_after_s = max(ceil(self._least_wait_s(entry)), 1)
        return error

    def _forget(self, name: str, given: Given) -> None:
        """Let go of a request whose client left. A load that is under way goes on."""
        entry = self._entries.get(name)
        if entry is None or given not in entry.waiting:
            return  # its model was answered or removed between the cancellation and this turn
        del entry.waiting[given]
        if not entry.waiting and not entry.promised:
            entry.wanted_since = None
        self._decide()

    def _leave(self, entry: Entry) -> None:
        """End a hold."""
        entry.holds -= 1
        if entry.holds == 0:
            entry.last_used = self._now()
            self._decide()

    def _least_wait_s(self, entry: Entry) -> float:
        """Return how long it takes at least until a model is open."""
        now, load_s = self._now(), entry.load_s or 0.0
        if entry.residency is Residency.LOADING:
            return max(entry.load_began + load_s - now, 0.0)
        if entry.residency is Residency.LOADED and not entry.held_back:
            return 0.0
        return load_s + self._decided.starts_in_s.get(entry.model.name, 0.0)

    def _overloaded(self, entry: Entry, what: str) -> EngineOverloaded:
        """Return the refusal of a request, which keeps the model wanted."""
        entry.promised = True
        after_s = self._least_wait_s(entry)
        if entry.load_s is None:
            since = entry.wanted_since if entry.wanted_since is not None else self._now()
            after_s = max(after_s, min(max(self._now() - since, MIN_GUESS_S), MAX_GUESS_S))
        retry_after_s = max(ceil(after_s), 1)
        name = entry.model.name
        error = EngineOverloaded(f"the model {name!r} {what}; try again in {retry_after_s} s")
        error.retry_after_s = retry_after_s
        return error

    # Loading and unloading

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _room_gib(self) -> float:
        return inf if self._budget_gib is None else self._budget_gib - self._fixed_gib()

    def _sum(self, entry: Entry) -> str:
        return (
            f"it takes {entry.need_gib or 0.0:.1f} GiB, and of {self._budget_gib:g} GiB "
            f"the models that are always loaded leave {self._room_gib():.1f}"
        )

    def _decide(self) -> Decision:
        """Decide, and begin what was decided."""
        if self._draining:
            return self._decided
        self._decided = decision = decide(
            self.residents(), self._room_gib(), self.slots, self._now(), self._terms
        )
        # First of all: one that leaves now gives no holds any more.
        for name, reason in decision.unload:
            self._begin_unload(self._entries[name], reason)
        for name, entry in self._entries.items():
            entry.held_back = name in decision.held_back
            if entry.wanted_since is not None and entry.open:
                entry.answer(None)
        for name in decision.load:
            self._begin_load(self._entries[name])
        self._look_again(decision.look_at)
        return decision

    def _look_again(self, moment: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if moment is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(moment + TIMER_S, self._decide)

    def _begin(self, what: str, entry: Entry, task: asyncio.Task[None]) -> None:
        task.set_name(f"{what} {entry.model.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin_load(self, entry: Entry) -> None:
        entry.residency = Residency.LOADING
        entry.load_began = self._now()
        log.info("model %s is loaded on demand", entry.model.name)
        self._begin("load", entry, asyncio.create_task(self._load(entry)))

    async def _load(self, entry: Entry) -> None:
        """Start the engines of a model, and see what came of it."""
        # An engine that failed while it was loaded may have a restart before it. It starts afresh.
        failed = [e for e in entry.model.engines if e.state is EngineState.FAILED]
        await self._end_engines(entry, failed)
        starts = (engine.ensure_ready(inf) for engine in entry.model.engines)
        for fault in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(fault, EngineError):
                log.warning("model %s: an engine did not start: %s", entry.model.name, fault)
            elif fault is not None:
                log.error(
                    "model %s: a fault of the gateway's own", entry.model.name, exc_info=fault
                )
        if entry.up:
            entry.load_s = self._now() - entry.load_began
            self._metrics.engine_load.observe((entry.model.name,), entry.load_s)
            log.info("model %s is ready after %.1f s", entry.model.name, entry.load_s)
            self._note_loaded(entry)
        else:
            self._note_failed(entry)
            # They would try again by themselves, and in memory that they do not have here.
            await self._end_engines(entry, entry.model.engines)
            entry.residency = Residency.UNLOADED
        self.changes.notify()
        self._decide()

    def _note_loaded(self, entry: Entry) -> None:
        entry.residency = Residency.LOADED
        entry.loaded_at = entry.last_used = self._now()
        if entry.load_s is None:
            entry.load_s = max((e.load_s or 0.0 for e in entry.model.engines), default=0.0) or None
        # Before anything else is decided: a load serves those who waited for it, whatever follows.
        entry.held_back = False
        entry.answer(None)

    def _note_failed(self, entry: Entry) -> None:
        wait_s = entry.note_fault(self._now())
        entry.asked_out = False
        name, reason = entry.model.name, entry.reason or "no engine told why"
        faults = (engine.blocked_by for engine in entry.model.engines)
        # The pauses here take the place of an engine's budget of restarts.
        entry.blocked_by = next((f for f in faults if f not in (None, GIVEN_UP)), None)
        if entry.blocked_by is not None:
            entry.retry_at = inf
            log.error(
                "model %s cannot be loaded: %s; no request has it loaded again: "
                "`vllm-gateway models load %s` does, or a reload that changes it",
                *(name, reason, name),
            )
        else:
            log.error(
                "model %s could not be loaded (%s); not tried again for %g s",
                *(name, reason, wait_s),
            )
        entry.answer(self._resting(entry))

    def _begin_rest(self, entry: Entry, wait_s: float) -> None:
        """End the engines of a model that has died again, and would be started again by itself."""
        log.error(
            "model %s died again %.0f s after it was loaded (%s); not loaded for %g s",
            *(entry.model.name, self._now() - entry.loaded_at),
            *(entry.reason or "no engine told why", wait_s),
        )
        entry.residency = Residency.UNLOADING
        self._begin("end", entry, asyncio.create_task(self._unload(entry)))
        entry.answer(self._resting(entry))

    def _resting(self, entry: Entry) -> EngineUnavailable:
        """Return the refusal of a request for a model that is not to be loaded yet."""
        name = entry.model.name
        if entry.blocked_by is not None:
            return out_of_service(name, entry.blocked_by)
        error = EngineUnavailable(f"the model {name!r} could not be loaded; try again later")
        error.retry_after_s = max(ceil(entry.retry_at - self._now()), 1)
        return error

    def _begin_unload(self, entry: Entry, reason: Reason) -> None:
        entry.residency = Residency.UNLOADING
        if entry.up:
            entry.failures = 0  # whatever it did before, this time it worked
        log.info("model %s is unloaded (%s)", entry.model.name, reason)
        self._metrics.model_evictions.add((entry.model.name, reason))
        self._begin("unload", entry, asyncio.create_task(self._unload(entry)))

    async def _unload(self, entry: Entry) -> None:
        await self._end_engines(entry, entry.model.engines)
        entry.residency = Residency.UNLOADED
        entry.asked_out = False
        self.changes.notify()
        self._decide()

    async def _end_engines(self, entry: Entry, engines: Sequence[Engine]) -> None:
        ends = (e.rest() if e.state is EngineState.FAILED else e.unload() for e in engines)
        for fault in await asyncio.gather(*ends, return_exceptions=True):
            if fault is not None:
                log.error("model %s: %s", entry.model.name, fault)
