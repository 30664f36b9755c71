"""The rooms that a request passes through, and what one request may take of the gateway."""

from dataclasses import dataclass
from typing import Self

from app.admission.admission import Admission
from app.limits.limiter import Limiter
from app.relay.attempts import Attempts
from app.residency.keeper import Keeper
from app.routing.catalogue import Catalogue
from app.settings import Settings
from app.telemetry.metrics import Metrics
from app.usage.budgets import Budgets


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route of the data plane. `label` is its bounded name in metrics and logs."""

    label: str
    methods: tuple[str, ...] = ("POST",)
    # False: the request names a stored thing by its id, not a model.
    names_model: bool = True
    # False: the answer takes no tokens of the model.
    metered: bool = True


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
        )


@dataclass(slots=True)
class Rooms:
    """What there is between a request and an engine. A reload replaces `bounds`, nothing else."""

    limiter: Limiter
    budgets: Budgets
    admission: Admission
    keeper: Keeper
    catalogue: Catalogue
    attempts: Attempts
    metrics: Metrics
    bounds: RelayBounds
