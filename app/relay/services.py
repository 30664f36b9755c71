"""The services that the relay calls for each request."""

from collections.abc import Callable
from dataclasses import dataclass, field

from app.admission import Admission
from app.capture import CaptureWriter
from app.limits import Limiter
from app.relay.bindings import Bindings
from app.relay.body_reader import ScanTurns
from app.relay.bounds import RelayBounds
from app.relay.engine_call import EngineIds
from app.relay.request_context import RequestsInFlight
from app.request_body import BodyMemory, CacheSalts, FieldRuleCache
from app.residency import UP, Forecast, OnDemandLoader, StartWaits, remaining_s
from app.routing import Catalogue, Model
from app.stored import StoredResponses
from app.telemetry.metrics import Metrics
from app.usage import Budgets
from engines.base import Engine, EngineState


@dataclass(frozen=True, slots=True)
class Forecasts:
    """Forecasts when each model can serve, from the state of its engines and loads.

    The rule that decides from these forecasts is pure (`app/residency/forecast.py`).
    """

    catalogue: Catalogue
    loader: OnDemandLoader
    is_about_to_start: Callable[[Engine], bool]

    def of(self, model: Model) -> Forecast | None:
        """Return when a model can serve; None: nothing is known to bring it up."""
        if model.on_demand:
            return self.loader.forecast(model.base)
        able = [replica.engine for replica in model.able]
        engines = [replica.engine for replica in model.replicas]
        if any(e.state is EngineState.READY and not e.is_restarted for e in able):
            return UP
        if model.is_loading_adapter:
            return Forecast(None)
        starts = [start for engine in engines if (start := engine.starting) is not None]
        if not starts:
            coming = any(e.is_restarted or self.is_about_to_start(e) for e in engines)
            return Forecast(None) if coming else None
        rests = [remaining_s(start.elapsed_s, start.expected_s) for start in starts]
        return Forecast(
            min((rest for rest in rests if rest is not None), default=None),
            doubtful=all(start.after_failure for start in starts),
        )

    def any_serves(self) -> bool:
        """Return whether some model is ready or can be loaded on demand."""
        return any(
            model.ready or (model.on_demand and self.of(model) is not None)
            for model in self.catalogue.models
        )

    @property
    def starts_queue(self) -> bool:
        """True if a load that begins now waits for other loads."""
        starting = (e.state is EngineState.STARTING for e in self.catalogue.engines)
        return sum(starting) >= self.loader.slots


@dataclass(slots=True, kw_only=True)
class RelayServices:
    """The services between a client and an engine. A reload replaces `bounds`, nothing else."""

    limiter: Limiter
    budgets: Budgets
    admission: Admission
    loader: OnDemandLoader
    catalogue: Catalogue
    metrics: Metrics
    bounds: RelayBounds
    body_memory: BodyMemory
    salts: CacheSalts
    stored: StoredResponses
    in_flight: RequestsInFlight
    captures: CaptureWriter
    is_about_to_start: Callable[[Engine], bool]
    rules: FieldRuleCache = field(default_factory=FieldRuleCache)
    scan_turns: ScanTurns = field(default_factory=ScanTurns)
    engine_ids: EngineIds = field(default_factory=EngineIds)
    # Models of which the log says that a prompt was too long to be recorded.
    long_prompts: set[str] = field(default_factory=set)
    forecasts: Forecasts = field(init=False)
    starts: StartWaits = field(init=False)
    bindings: Bindings = field(init=False)

    def __post_init__(self) -> None:
        self.bindings = Bindings(self.catalogue, self.limiter, self.salts, self.rules, self.metrics)
        self.forecasts = Forecasts(self.catalogue, self.loader, self.is_about_to_start)
        self.starts = StartWaits(self.metrics, self.loader.changes)
