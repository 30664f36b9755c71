"""The fallbacks that are left for a request, and whether it waits for its own model.

The rule itself is pure (`app/residency/forecast.py`); here it gets the forecasts of the models.
"""

import asyncio
from collections.abc import Callable
from time import perf_counter

from app.errors import (
    EngineFailed,
    EngineOverloaded,
    EngineTooSlow,
    EngineUnavailable,
    ModelNotFound,
    RateLimited,
)
from app.relay.lost_engine import LostEngine
from app.relay.request_context import RequestContext
from app.relay.services import RelayServices
from app.residency import Ask, GiveUp, NextStep, StartWait, Use, Wait, next_step, own_step
from app.routing import Model

# The errors by which a model cannot serve a request, before any of its response has been sent. The
# last two are of a fallback that is over its own limits, or has been removed since.
CANNOT_SERVE = (
    EngineUnavailable, EngineOverloaded, EngineFailed, EngineTooSlow, RateLimited, ModelNotFound,
)  # fmt: skip


class FallbackChain:
    """The fallbacks of one request, which may be none. Use it once."""

    def __init__(self, services: RelayServices, requested: Model, request: RequestContext) -> None:
        self._services = services
        self._requested = requested
        self._endpoint = request.endpoint.label
        self._key_id = request.principal.id
        # By name: a reload may replace any of them meanwhile.
        allows = request.principal.allows
        self.untried = [n for n in requested.fallbacks if services.catalogue.may_use(n, allows)]
        self._most_s = requested.load_wait_s
        if request.deadline is not None:
            self._most_s = min(self._most_s, max(request.deadline - perf_counter(), 0.0))
        self._waits_until = asyncio.get_running_loop().time() + self._most_s

    @property
    def left_s(self) -> float:
        """Seconds for which the request may still wait for its model."""
        return self._waits_until - asyncio.get_running_loop().time()

    def next_step(self) -> NextStep:
        """Return the next step: see `app.residency.forecast`."""
        catalogue, forecasts = self._services.catalogue, self._services.forecasts
        models = map(self._find, self.untried)
        return next_step(
            forecasts.of(catalogue.current(self._requested)),
            [None if model is None else forecasts.of(model) for model in models],
            left_s=self.left_s,
            queued=forecasts.starts_queue,
        )

    def take(self, index: int) -> Model | None:
        """Remove a fallback and return it; None: it was removed or does not serve the endpoint."""
        return self._find(self.untried.pop(index))

    def yields(self) -> bool:
        """Return whether a fallback serves the request sooner than the requested model."""
        return isinstance(self.next_step(), Use)

    def own_step(self, lost: LostEngine | None) -> Ask | Wait | GiveUp:
        """Return the next step where no fallback is left: see `app.residency.forecast`.

        `lost` is the engine that died with the request, or refused it.
        """
        requested = self._requested
        if lost is not None and lost.unnoticed:
            return GiveUp() if lost.overdue else Wait()
        if requested.on_demand:
            return Ask()  # the loader knows when it comes back, and bounds the wait
        current = self._services.catalogue.current(requested)
        forecast = self._services.forecasts.of(current)
        return own_step(forecast, most_s=self._most_s, left_s=self.left_s)

    async def wait(self, next_step: Callable[[], NextStep] | None = None) -> StartWait:
        """Return when the next step is another than to wait. Raises EngineOverloaded."""
        model, services = self._requested, self._services
        step = next_step or self.next_step

        def waited() -> bool:
            return services.admission.draining or step() != Wait()

        return await services.starts.wait(model.name, self._key_id, model.max_waiting, waited)

    def _find(self, name: str) -> Model | None:
        model = self._services.catalogue.get(name)
        return model if model is not None and model.serves(self._endpoint) else None
