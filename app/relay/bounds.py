"""The resources that one request may take, as the configuration sets them."""

from dataclasses import dataclass
from typing import Self

from app.capture import CaptureRules
from app.request_body import BodyMemoryBounds
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class RelayBounds:
    """The resources that one request may take."""

    body_bytes: int
    # Seconds before a client that has stopped reading is disconnected.
    client_stall_s: float
    # Seconds of silence before a stream gets an SSE comment; None: never.
    keepalive_s: float | None
    # Tokens reserved for the output of a request without an output limit.
    default_output_tokens: int
    # Weight of a cached prompt token against limits.
    cached_weight: float
    # Weight of a token of an endpoint that is not metered: tokenize, count_tokens.
    tokenize_weight: float
    # What is captured; None: nothing.
    capture: CaptureRules | None = None

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the bounds that a configuration sets."""
        server, limits = settings.server, settings.limits
        return cls(
            server.max_body_bytes,
            server.client_stall_s,
            server.sse_keepalive_s,
            limits.unstated_output_tokens,
            limits.cached_token_weight,
            limits.tokenize_weight,
            CaptureRules.of(settings.capture),
        )


def memory_bounds(settings: Settings) -> BodyMemoryBounds:
    """Return the bounds of memory for request bodies that a configuration sets."""
    server = settings.server
    return BodyMemoryBounds(
        server.body_memory_bytes,
        server.body_memory_per_key_bytes,
        server.body_memory_per_peer_bytes,
    )
