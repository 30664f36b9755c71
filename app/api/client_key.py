"""Authentication and limits of GET /v1/models and /v1/usage, which FastAPI serves."""

from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from app.api.admin_auth import CALLER, CALLER_LIMITS, SESSION_CALLER
from app.api.middleware import notes_of
from app.auth import Authenticator, Principal
from app.errors import InvalidApiKey
from app.limits import Limiter, LimitRequest, ReadLimiter
from app.settings import NO_LIMITS
from app.telemetry import UNKNOWN_MODEL
from app.telemetry.metrics import Metrics

ClientKey = Callable[[Request, Response], Awaitable[None]]


def require_client_key(
    authenticator: Authenticator, limiter: Limiter, metrics: Metrics
) -> ClientKey:
    """Return a dependency that authenticates a client's key for a read; `Caller` is who has it.

    The response has the rate headers, as all of the data plane's, but a read does not count against
    those limits: reads have a rate limit of their own. The dependency raises InvalidApiKey,
    RateLimited and ServiceUnavailable.
    """
    reads = ReadLimiter()

    async def authenticate(request: Request, response: Response) -> None:
        try:
            principal: Principal = request.scope.get(
                SESSION_CALLER
            ) or await authenticator.authenticate(request.scope["headers"])
        except InvalidApiKey as error:
            metrics.auth_failures.add((error.reason,))
            raise
        notes_of(request.scope).key_id = principal.id
        request_limits = LimitRequest(
            principal.id,
            principal.limits,
            UNKNOWN_MODEL,
            NO_LIMITS,
            0,
            concurrent=False,
            precharged=True,  # no request is counted
            owner=principal.owner,
        )
        with await limiter.decide(request_limits) as decision:
            request.scope[CALLER_LIMITS] = decision.headers
            for name, value in decision.headers:
                response.headers[name.decode()] = value.decode()
        if (refusal := reads.refusal(principal.id, principal.limits)) is not None:
            metrics.rate_limited.add((refusal.limit,))
            raise refusal
        request.scope[CALLER] = principal

    return authenticate
