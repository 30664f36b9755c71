"""Authorization under /admin: one table of rights by role; what is not in it is denied."""

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.act_limits import ActLimiter
from app.api.middleware import notes_of
from app.audit import Actor
from app.auth import Authenticator, Principal, Role
from app.errors import (
    BadRequest,
    GatewayError,
    InvalidApiKey,
    PermissionDenied,
    ServiceUnavailable,
    dialect_of,
)
from app.telemetry.metrics import Metrics

# A key with a thousand long patterns takes a quarter of that.
MAX_BODY_BYTES = 1_048_576
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
# The scope key of the caller whom a session of the console has authenticated.
SESSION_CALLER = "gateway.session_caller"
# The scope key of a function that finds that caller again, later in a long response.
SESSION_CHECK = "gateway.session_check"
# The scope key of the caller whom a route's dependency has let in.
CALLER = "gateway.caller"
# The scope key of the caller's x-ratelimit-* headers, set once the limiter has decided.
CALLER_LIMITS = "gateway.caller_limits"


class Right(StrEnum):
    """A right that a route under /admin requires."""

    SCHEMA_READ = "schema:read"
    KEYS_READ = "keys:read"
    KEYS_WRITE = "keys:write"
    OWNERS_READ = "owners:read"
    OWNERS_WRITE = "owners:write"
    USAGE_READ = "usage:read"
    ENGINES_READ = "engines:read"
    ENGINES_WRITE = "engines:write"
    CONFIGURATION_WRITE = "configuration:write"
    LOGS_READ = "logs:read"
    LOGS_WRITE = "logs:write"
    REQUESTS_READ = "requests:read"
    REQUESTS_WRITE = "requests:write"
    AUDIT_READ = "audit:read"
    # What requests and answers said: of administrators only, whatever else a role may read.
    CAPTURES_READ = "captures:read"
    CAPTURES_WRITE = "captures:write"


_READS = frozenset(
    {
        Right.SCHEMA_READ,
        Right.KEYS_READ,
        Right.OWNERS_READ,
        Right.USAGE_READ,
        Right.ENGINES_READ,
        Right.LOGS_READ,
        Right.REQUESTS_READ,
    }
)

RIGHTS: Mapping[Role, frozenset[Right]] = {
    Role.CLIENT: frozenset(),
    Role.OWNER_MANAGER: frozenset(
        {
            Right.SCHEMA_READ,
            Right.KEYS_READ,
            Right.KEYS_WRITE,
            Right.OWNERS_READ,
            Right.USAGE_READ,
            Right.REQUESTS_READ,
        }
    ),
    Role.OPERATOR: frozenset(
        {
            Right.SCHEMA_READ,
            Right.ENGINES_READ,
            Right.ENGINES_WRITE,
            Right.REQUESTS_READ,
            Right.REQUESTS_WRITE,
        }
    ),
    Role.AUDITOR: _READS | {Right.AUDIT_READ},
    Role.MANAGER: _READS | {Right.KEYS_WRITE},
    Role.ADMIN: frozenset(Right),
}
# The roles whose keys a role may create and change: no key can make one that may do more.
MANAGED_ROLES: Mapping[Role, frozenset[Role]] = {
    Role.CLIENT: frozenset(),
    Role.OWNER_MANAGER: frozenset({Role.CLIENT}),
    Role.OPERATOR: frozenset(),
    Role.AUDITOR: frozenset(),
    Role.MANAGER: frozenset({Role.CLIENT}),
    Role.ADMIN: frozenset(Role),
}


async def find_admin(scope: Scope, authenticator: Authenticator) -> Principal:
    """Return the caller of /admin, by session or key.

    Raises InvalidApiKey, PermissionDenied and ServiceUnavailable.
    """
    caller: Principal | None = scope.get(SESSION_CALLER)
    if caller is None:
        return await authenticator.admin(scope["headers"])
    if caller.role is Role.CLIENT:
        raise PermissionDenied("this API key is for models only")
    return caller


async def check_admin(scope: Scope, authenticator: Authenticator) -> None:
    """Check again that the key or the session of a caller of /admin has not ended or changed.

    Raises InvalidApiKey, PermissionDenied and ServiceUnavailable.
    """
    find_again = scope.get(SESSION_CHECK)
    if find_again is not None:
        await find_again()
        return
    found, before = await authenticator.admin(scope["headers"]), scope.get(CALLER)
    if before is not None and found.scope != before.scope:
        raise PermissionDenied("what this key may see has changed: ask again")


async def still_allowed(check: Callable[[], Awaitable[object]]) -> bool:
    """Return whether the caller of a long response may go on with it.

    `check` raises GatewayError once it may not. A database that is away ends no response.
    """
    try:
        await check()
    except ServiceUnavailable:
        return True
    except GatewayError:
        return False
    return True


class RequireRight:
    """A dependency that requires a right; `Caller` is who has it."""

    def __init__(self, authenticator: Authenticator, right: Right, *, scoped: bool = False) -> None:
        """`scoped`: the route reaches only what is in the scope of its caller.

        Callers with a scope are refused by every other route.
        """
        self._authenticator = authenticator
        self.right = right
        self._scoped = scoped

    async def __call__(self, request: Request) -> Principal:
        """Raise InvalidApiKey, PermissionDenied or ServiceUnavailable, or return the caller."""
        principal = await find_admin(request.scope, self._authenticator)
        if not has_right(principal, self.right, scoped=self._scoped):
            raise PermissionDenied(
                f"the role {principal.role} does not have the right {self.right} here"
            )
        request.scope[CALLER] = principal
        return principal


def has_right(principal: Principal, right: Right, *, scoped: bool) -> bool:
    """Return whether a caller has a right. `scoped` as in RequireRight."""
    if principal.scope.owner == "":
        return False  # keys without an owner belong to nobody, and to no manager of an owner
    return right in RIGHTS[principal.role] and (scoped or principal.scope.is_whole)


def refuse_unknown_query(request: Request) -> None:
    """Raise BadRequest for a parameter that the route does not have: a typo filters nothing."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            names = f"its parameters are {', '.join(known)}" if known else "it has none"
            raise BadRequest(f"unknown query parameter {name[:64]!r}: {names}")


def caller_of(request: Request) -> Principal:
    """Return the caller whom a dependency of the route has let in."""
    principal: Principal = request.scope[CALLER]
    return principal


Caller = Annotated[Principal, Depends(caller_of)]


def actor_of(request: Request) -> Actor:
    """Return the caller whom a dependency of the route has let in, for the audit."""
    caller = caller_of(request)
    return Actor(caller.id, caller.role, client_address(request.scope))


CallingActor = Annotated[Actor, Depends(actor_of)]


def client_address(scope: Scope) -> str | None:
    """Return the address from which a request has come."""
    address, _ = scope.get("client") or (None, 0)
    return address


def admin_router(path: str, tag: str) -> APIRouter:
    """Return a router below /admin."""
    # For the OpenAPI document; `RequireRight` checks the key.
    scheme = Depends(HTTPBearer(auto_error=False, scheme_name="admin"))
    return APIRouter(
        prefix=f"/admin/{path}", tags=[tag], dependencies=[scheme, Depends(refuse_unknown_query)]
    )


def error_response(error: GatewayError, scope: Scope) -> Response:
    """Return an error in the dialect of a path, and note it for the access log."""
    notes_of(scope).fault = error.message
    pairs = [*error.headers(), *scope.get(CALLER_LIMITS, ())]
    headers = {name.decode(): value.decode() for name, value in pairs}
    body = error.body(dialect_of(scope["path"]))
    return Response(body, error.status, headers, media_type="application/json")


def bound_body(receive: Receive, limit: int) -> Receive:
    """Return a `receive` that raises HTTPException 413 for a body of more bytes than `limit`."""
    size = 0

    async def bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise HTTPException(413)
        return message

    return bounded


class AdminAuth:
    """Requires a key before anything under /admin reads a body or reveals which paths exist.

    FastAPI reads and checks a body before it calls the dependencies of a route. Pure ASGI;
    `scope["path"]` never holds anything of the Host header.
    """

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, metrics: Metrics, acts: ActLimiter
    ) -> None:
        self._app = app
        self._acts = acts
        self._authenticator = authenticator
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == "/admin" or path.startswith("/admin/")):
            await self._app(scope, receive, send)
            return
        try:
            principal = await find_admin(scope, self._authenticator)
            notes_of(scope).key_id = principal.id
            if scope["method"] not in _READING:
                self._acts.check(principal)
        except GatewayError as error:
            if isinstance(error, InvalidApiKey):
                self._metrics.auth_failures.add((error.reason,))
            await error_response(error, scope)(scope, receive, send)
            return
        await self._app(scope, bound_body(receive, MAX_BODY_BYTES), send)
