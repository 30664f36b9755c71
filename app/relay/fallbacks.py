"""The model that a request asks for and the fallbacks that are left for it, and when each is up.

The rule itself is pure (`app/residency/forecast.py`); here it is fed with what engines and loads
are at.
"""

import asyncio
from collections.abc import Callable

from app.errors import (
    EngineFailed,
    EngineOverloaded,
    EngineTooSlow,
    EngineUnavailable,
    ModelNotFound,
    RateLimited,
)
from app.relay.services import RelayServices
from app.residency import StartWait, Step, next_step
from app.routing import Model

# What says that a model cannot serve a request, before anything of an answer has left. The last two
# are of a fallback that all keys together use too much, or that has gone since.
CANNOT_SERVE = (
    EngineUnavailable, EngineOverloaded, EngineFailed, EngineTooSlow, RateLimited, ModelNotFound,
)  # fmt: skip
# How often a request asks the model that it waited for: one that is up and cannot serve is down.
MOST_ASKS = 2


class FallbackChain:
    """What else may serve one request, and whether it waits. Use it once."""

    def __init__(
        self, services: RelayServices, asked: Model, allows: Callable[[str], bool], endpoint: str
    ) -> None:
        self._services = services
        self._asked = asked
        self._endpoint = endpoint
        # By name, since a reload may replace any of them meanwhile.
        self._left = [name for name in asked.fallbacks if allows(name)]
        self._waits_until = asyncio.get_running_loop().time() + asked.load_wait_s

    @property
    def any_left(self) -> bool:
        """Whether a fallback is left."""
        return bool(self._left)

    @property
    def left_s(self) -> float:
        """For how much longer the request may wait for its model."""
        return self._waits_until - asyncio.get_running_loop().time()

    def step(self) -> Step | int:
        """Return what to do next: see `app.residency.forecast.next_step`."""
        catalogue, forecasts = self._services.catalogue, self._services.forecasts
        models = map(self._named, self._left)
        return next_step(
            forecasts.of(catalogue.current(self._asked)),
            [None if model is None else forecasts.of(model) for model in models],
            left_s=self.left_s,
            queued=forecasts.starts_queue,
        )

    def take(self, index: int) -> Model | None:
        """Return a fallback, which is left no longer; None: it is gone, or does not serve this."""
        return self._named(self._left.pop(index))

    def yields(self) -> bool:
        """Whether a fallback serves the request sooner than the model that was asked for."""
        return isinstance(self.step(), int)

    async def wait(self) -> StartWait:
        """Return when there is something else to do than to wait. Raises EngineOverloaded."""
        asked = self._asked
        return await self._services.starts.wait(asked.name, asked.max_waiting, self._over)

    def _over(self) -> bool:
        return self._services.admission.draining or self.step() is not Step.WAIT

    def _named(self, name: str) -> Model | None:
        model = self._services.catalogue.get(name)
        return model if model is not None and model.serves(self._endpoint) else None
