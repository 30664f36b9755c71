"""The rooms that a request passes through, and what one request may take of the gateway."""

from dataclasses import dataclass, field
from typing import Self

from app.admission import Admission
from app.limits import Limiter
from app.relay.body_memory import BodyMemory, BodyMemoryBounds
from app.relay.body_reader import ScanTurns
from app.relay.cache_salts import CacheSalts
from app.relay.engine_request import EngineIds
from app.relay.field_rules import RuleBook
from app.relay.forecasts import Forecasts
from app.relay.in_flight import RequestsInFlight
from app.residency import OnDemandLoader, StartWaits
from app.routing import Catalogue
from app.settings import Settings
from app.stored import StoredResponses
from app.telemetry.metrics import Metrics
from app.usage.budgets import Budgets


@dataclass(frozen=True, slots=True)
class RelayBounds:
    """What one request may take of the gateway."""

    body_bytes: int
    # How long a client may leave unread what waits for it.
    client_stall_s: float
    # After how much silence a stream gets a comment; None: never.
    keepalive_s: float | None
    # What a request that does not say how long its answer may be reserves for it, in tokens.
    unstated_output: int
    # What a cached prompt token counts against limits.
    cached_weight: float
    # What a token counts that is only counted, or turned into text and back.
    tokenize_weight: float

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the bounds of a configuration."""
        server, limits = settings.server, settings.limits
        return cls(
            server.max_body_bytes,
            server.client_stall_s,
            server.sse_keepalive_s,
            limits.unstated_output_tokens,
            limits.cached_token_weight,
            limits.tokenize_weight,
        )


def memory_bounds(settings: Settings) -> BodyMemoryBounds:
    """Return how many bytes of bodies a configuration lets the gateway hold."""
    server = settings.server
    return BodyMemoryBounds(
        server.body_memory_bytes,
        server.body_memory_per_key_bytes,
        server.body_memory_per_peer_bytes,
    )


@dataclass(slots=True)
class RelayServices:
    """What there is between a request and an engine. A reload replaces `bounds`, nothing else."""

    limiter: Limiter
    budgets: Budgets
    admission: Admission
    keeper: OnDemandLoader
    catalogue: Catalogue
    metrics: Metrics
    bounds: RelayBounds
    body_memory: BodyMemory
    salts: CacheSalts
    stored: StoredResponses
    in_flight: RequestsInFlight
    rules: RuleBook = field(default_factory=RuleBook)
    scan_turns: ScanTurns = field(default_factory=ScanTurns)
    engine_ids: EngineIds = field(default_factory=EngineIds)
    forecasts: Forecasts = field(init=False)
    starts: StartWaits = field(init=False)

    def __post_init__(self) -> None:
        self.forecasts = Forecasts(self.catalogue, self.keeper)
        self.starts = StartWaits(self.metrics, self.keeper.changes)
