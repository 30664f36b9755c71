"""When each model can serve: what its engines and its load under way say now.

The rule that decides from these forecasts is pure (`app/residency/forecast.py`).
"""

from app.residency.forecast import UP, Forecast, remaining_s
from app.residency.loader import OnDemandLoader
from app.routing import Catalogue, Model
from engines.base import EngineState


class Forecasts:
    """When each model can serve."""

    def __init__(self, catalogue: Catalogue, keeper: OnDemandLoader) -> None:
        self._catalogue = catalogue
        self._keeper = keeper

    def of(self, model: Model) -> Forecast | None:
        """Return when a model can serve; None: nothing is known to bring it up."""
        if model.on_demand:
            return self._keeper.forecast(model.name)
        if model.ready:
            return UP
        starts = [s for one in model.replicas if (s := one.engine.starting) is not None]
        if not starts:
            return None
        rests = [remaining_s(start.elapsed_s, start.expected_s) for start in starts]
        return Forecast(min((rest for rest in rests if rest is not None), default=None))

    def any_serves(self) -> bool:
        """Return whether a request could be served now, by some model, or after its load."""
        return any(
            model.ready or (model.on_demand and self.of(model) is not None)
            for model in self._catalogue.models
        )

    @property
    def starts_queue(self) -> bool:
        """Whether a load that begins now waits for others that are under way."""
        starting = (e.state is EngineState.STARTING for e in self._catalogue.engines)
        return sum(starting) >= self._keeper.slots
