"""The section `limits`: rate limits, and how requests are counted against them."""

from typing import Annotated, Literal

from pydantic import Field

from engines.spec import SpecModel

Limit = Annotated[int, Field(ge=0, le=10**9)]
RequestsPerMinute = Annotated[
    Limit | None, Field(description="Maximum number of requests that may start per minute.")
]
TokensPerMinute = Annotated[
    Limit | None, Field(description="Maximum number of prompt and output tokens per minute.")
]
ConcurrentRequests = Annotated[
    Limit | None, Field(description="Maximum number of requests in flight at once.")
]


class LimitSettings(SpecModel):
    """Limits of one key, or of one model for all keys. null: no limit; 0: nothing is allowed."""

    requests_per_minute: RequestsPerMinute = None
    tokens_per_minute: TokensPerMinute = None
    concurrent_requests: ConcurrentRequests = None


NO_LIMITS = LimitSettings()


class DefaultLimitSettings(LimitSettings):
    """Limits of a key without its own. null: no limit; 0: nothing is allowed."""

    requests_per_minute: RequestsPerMinute = 600
    tokens_per_minute: TokensPerMinute = 200_000
    concurrent_requests: ConcurrentRequests = 32


class LimitsSettings(SpecModel):
    """Rate limits, and how requests and tokens count against them."""

    default: DefaultLimitSettings = Field(
        DefaultLimitSettings(), description="Limits of a key that has none of its own."
    )
    redis_unavailable: Literal["local", "open", "closed"] = Field(
        "local",
        description="Limits while Redis is unreachable. local: each gateway counts on its own; "
        "open: requests are not limited; closed: requests are refused with 503.",
    )
    burst_s: float = Field(
        60.0,
        ge=1,
        le=60,
        description="Unused part of a per-minute limit that can be saved up and used at once, in "
        "seconds' worth of the limit.",
    )
    unstated_output_tokens: int = Field(
        4096,
        ge=1,
        description="Output tokens reserved for a request that sets no max_tokens. The tokens "
        "actually used are charged when it ends.",
    )
    cached_token_weight: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Weight of a cached prompt token in token limits. 0: cached tokens are free.",
    )
    tokenize_weight: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Weight of a token in token limits where tokens are only counted or "
        "converted: /tokenize, /detokenize and /v1/messages/count_tokens.",
    )
