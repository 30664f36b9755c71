"""Leases on on-demand models: a request waits until its model is loaded, and keeps it loaded.

Each waiting request awaits a future, which is resolved once: with a lease, by the timeout, by an
error for all, or by cancellation; a request that is canceled after it was granted a lease returns
it. `model_loads` has the states of a model, and why callers cannot race.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from math import ceil, inf

from app.errors import EngineOverloaded, EngineUnavailable, GatewayError, shutting_down
from app.fair_places import find_displaced
from app.residency.forecast import UP, Forecast, remaining_s
from app.residency.model_lease import ModelLease
from app.residency.model_loads import ModelLoads
from app.residency.model_state import LeaseFuture, ModelState
from app.residency.policy import SLACK_GIB, ModelSnapshot, Residency

# Bounds of Retry-After for a load of unknown duration: as long again as it has taken so far.
MIN_GUESS_S, MAX_GUESS_S = 5.0, 60.0


class OnDemandLoader(ModelLoads):
    """Loads models on demand; `lease` keeps one loaded for a request."""

    def __contains__(self, name: str) -> bool:
        return name in self._states

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a model."""
        return sum(len(state.waiting) for state in self._states.values())

    def snapshot(self, name: str) -> ModelSnapshot | None:
        """Return the present state of a model; None: it is not on demand."""
        state = self._states.get(name)
        return None if state is None else state.snapshot()

    def loading_s(self, name: str) -> float | None:
        """Return for how long a model has been loading or waiting for that; None: it is not."""
        state = self._states.get(name)
        if state is None or self._closing or self._now() < state.retry_at:
            return None
        if state.residency is Residency.LOADING:
            return self._now() - state.load_began
        return None if state.wanted_since is None else self._now() - state.wanted_since

    def forecast(self, name: str) -> Forecast | None:
        """Return when a model can serve; None: no request can load it now."""
        state = self._states.get(name)
        if state is None or self._closing:
            return None
        if state.available:
            return UP
        now, expected_s = self._now(), state.expected_s
        if now < state.retry_at:  # also while its failed load is cleaned up
            return None
        if state.residency is Residency.LOADING:
            return Forecast(remaining_s(now - state.load_began, expected_s))
        if (state.need_gib or 0.0) > self._capacity_gib() + SLACK_GIB:
            return None
        begins_in_s = self._decision.starts_in_s.get(name, 0.0)
        in_s = None if expected_s is None else begins_in_s + expected_s
        return Forecast(in_s, cold=state.wanted_since is None)

    async def lease(
        self,
        name: str,
        key: str | None = None,
        *,
        yields: Callable[[], bool] | None = None,
        bound_s: float = inf,
        resumed: bool = False,
    ) -> ModelLease:
        """Return a lease on a model once it is loaded; await it in the `with` that ends it.

        The timeout is the model's `load_wait_s`, at most `bound_s`. The request also stops waiting
        when `yields` returns True, since another model serves it; the load continues. Raises
        EngineOverloaded if the wait is or would be too long or too many requests wait, and
        EngineUnavailable if the model cannot be loaded.

        When too many wait, a request of another key may give up its place for one of `key`
        (`fair_places.py`); None: it keeps its own, and displaces none. A `resumed` request was
        interrupted: it waits for `bound_s`, however many others wait.
        """
        state = self._states.get(name)
        if state is None:
            raise EngineUnavailable(f"the model {name!r} was replaced just now; try again")
        if state.available:
            state.leases += 1
            return ModelLease(partial(self._release, state), None)
        settings = state.model.settings
        self._request_load(state)
        if resumed:
            return await self._wait(state, bound_s)
        if not state.available:
            if yields is not None and yields():
                raise self._served_elsewhere(state)
            if self._min_wait_s(state) > settings.load_wait_s:
                raise self._overloaded(state, "takes longer to load than a request may wait")
            if len(state.waiting) >= settings.queue.max_waiting:
                self._make_room(state, key)
        return await self._wait(state, min(settings.load_wait_s, bound_s), yields, key)

    async def load(self, name: str) -> None:
        """Load a model for an operator; return when it is loaded.

        Ignores the backoff of failed loads. Raises KeyError for a model that is not on demand, and
        EngineUnavailable with the reason of a failure.
        """
        state = self._states[name]
        state.retry_at, state.failures, state.blocked_by = 0.0, 0, None
        if state.available:
            return
        self._request_load(state)
        try:
            with await self._wait(state, inf):
                pass
        except EngineUnavailable as error:
            raise EngineUnavailable(state.reason or error.message) from None

    async def unload(self, name: str) -> None:
        """Unload a model for an operator, after its requests in flight; return when it is done.

        New requests wait meanwhile, and load it again. Returns at once also if a reload removes the
        model: the owner of its engines stops them. Raises KeyError for a model that is not on
        demand, and EngineUnavailable while the gateway is shutting down.
        """
        state = self._states[name]
        if state.residency is Residency.UNLOADED:
            return
        if self._closing:  # nothing is decided any more
            raise shutting_down()
        state.unload_requested = True
        self._decide()
        await self.changes.wait_for(lambda: not state.unload_requested)

    def _make_room(self, state: ModelState, key: str | None) -> None:
        """Refuse a waiting request instead of a new one of `key`. Raises EngineOverloaded."""
        displaced = None if key is None else find_displaced(state.waiting, key)
        if displaced is None:
            raise self._overloaded(state, "has as many requests waiting for it as it may")
        reason = "has as many requests waiting for it as it may, most of them of this key"
        displaced.set_result(self._overloaded(state, reason))
        del state.waiting[displaced]

    async def _wait(
        self,
        state: ModelState,
        timeout_s: float,
        yields: Callable[[], bool] | None = None,
        key: str | None = None,
    ) -> ModelLease:
        """Return a lease once it is granted."""
        loop = asyncio.get_running_loop()
        name, began = state.model.name, loop.time()
        granted: LeaseFuture = loop.create_future()
        state.waiting[granted] = key
        if state.available:
            state.answer(None)
        timeout: asyncio.TimerHandle | None = None
        if timeout_s < inf:
            timeout = loop.call_later(timeout_s, self._time_out, name, granted, timeout_s)
        if yields is not None:
            self._watch_alternatives(name, granted, yields)
        self._metrics.queue_depth.add((name,), 1)
        try:
            answer = await granted
        except BaseException:
            self._abandon(name, granted)
            raise
        finally:
            if timeout is not None:
                timeout.cancel()
            self._metrics.queue_depth.add((name,), -1)
            self._metrics.queue_wait.observe((name,), loop.time() - began)
        if isinstance(answer, GatewayError):
            raise answer
        return ModelLease(partial(self._release, answer), loop.time() - began)

    def _watch_alternatives(
        self, name: str, granted: LeaseFuture, yields: Callable[[], bool]
    ) -> None:
        """End a wait as soon as another model serves the request; checked at every change."""
        if granted.done():
            return
        if yields():
            state = self._states[name]
            del state.waiting[granted]
            granted.set_result(self._served_elsewhere(state))
        else:
            change = self.changes.next()
            change.add_done_callback(lambda _: self._watch_alternatives(name, granted, yields))

    def _time_out(self, name: str, granted: LeaseFuture, timeout_s: float) -> None:
        """Refuse a request after its timeout; the model stays wanted."""
        if not granted.done():
            state = self._states[name]  # a removed model has answered its waiting requests
            granted.set_result(self._overloaded(state, f"was not loaded within {timeout_s:g} s"))
            del state.waiting[granted]

    def _served_elsewhere(self, state: ModelState) -> EngineUnavailable:
        """Return the error for a request that another model serves; this one stays wanted."""
        state.retry_expected = True
        error = EngineUnavailable(f"the model {state.model.name!r} is loading")
        error.retry_after_s = max(ceil(self._min_wait_s(state)), 1)
        return error

    def _abandon(self, name: str, granted: LeaseFuture) -> None:
        """Forget a request that was canceled. A load in progress continues."""
        if granted.done() and not granted.cancelled():
            if isinstance(answer := granted.result(), ModelState):
                self._release(answer)
            return
        state = self._states.get(name)
        if state is None or granted not in state.waiting:
            return  # it was answered, or its model removed, before this task ran
        del state.waiting[granted]
        if not state.waiting and not state.retry_expected:
            state.wanted_since = None
        self._decide()

    def _release(self, state: ModelState) -> None:
        """End a lease."""
        state.leases -= 1
        if state.leases == 0:
            state.last_used = self._now()
            self._decide()

    def _min_wait_s(self, state: ModelState) -> float:
        """Return the shortest time in which a model can be available."""
        now, load_s = self._now(), state.load_s or 0.0
        if state.residency is Residency.LOADING:
            return max(state.load_began + load_s - now, 0.0)
        if state.residency is Residency.LOADED and not state.draining:
            return 0.0
        return load_s + self._decision.starts_in_s.get(state.model.name, 0.0)

    def _overloaded(self, state: ModelState, reason: str) -> EngineOverloaded:
        """Return the error for a request that is refused; the model stays wanted."""
        state.retry_expected = True
        after_s = self._min_wait_s(state)
        if state.load_s is None:
            since = state.wanted_since if state.wanted_since is not None else self._now()
            after_s = max(after_s, min(max(self._now() - since, MIN_GUESS_S), MAX_GUESS_S))
        retry_after_s = max(ceil(after_s), 1)
        name = state.model.name
        error = EngineOverloaded(f"the model {name!r} {reason}; try again in {retry_after_s} s")
        error.retry_after_s = retry_after_s
        return error
