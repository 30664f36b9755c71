"""Rate limits of keys, owners and models: requests and tokens per minute, concurrent requests.

`Limiter` decides on a request, its `LimitDecision` settles the usage, `LimitUse` is the part of a
limit in use, and `ReadLimiter` limits reads. The limits are counted in `memory_store`, or in Redis
(`redis_store`, `script.lua`), which is imported only where it is used.
"""

from app.limits.limiter import LimitDecision, Limiter, ReadLimiter
from app.limits.terms import HEADER_NAMES, LimitRequest
from app.limits.terms import Scope as LimitScope
from app.limits.use import LimitUse

__all__ = (
    "HEADER_NAMES",
    "LimitDecision",
    "LimitRequest",
    "LimitScope",
    "LimitUse",
    "Limiter",
    "ReadLimiter",
)
