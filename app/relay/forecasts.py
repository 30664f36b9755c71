"""When each model can serve: what its engines and its load under way say now.

The rule that decides from these forecasts is pure (`app/residency/forecast.py`).
"""

from app.residency import UP, Forecast, OnDemandLoader, remaining_s
from app.routing import Catalogue, Model
from engines.base import EngineState


class Forecasts:
    """Forecasts for every model, from the state of its engines and loads."""

    def __init__(self, catalogue: Catalogue, loader: OnDemandLoader) -> None:
        self._catalogue = catalogue
        self._loader = loader

    def of(self, model: Model) -> Forecast | None:
        """Return when a model can serve; None: nothing is known to bring it up."""
        if model.on_demand:
            return self._loader.forecast(model.name)
        if model.ready:
            return UP
        starts = [s for r in model.replicas if (s := r.engine.starting) is not None]
        if not starts:
            return None
        rests = [remaining_s(start.elapsed_s, start.expected_s) for start in starts]
        return Forecast(min((rest for rest in rests if rest is not None), default=None))

    def any_serves(self) -> bool:
        """Return whether some model is ready or can be loaded on demand."""
        return any(
            model.ready or (model.on_demand and self.of(model) is not None)
            for model in self._catalogue.models
        )

    @property
    def starts_queue(self) -> bool:
        """True if a load that begins now waits for other loads."""
        starting = (e.state is EngineState.STARTING for e in self._catalogue.engines)
        return sum(starting) >= self._loader.slots
