"""What a key may do under /admin: one table, and what is not in it is denied."""

from collections.abc import Mapping
from enum import StrEnum

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.middleware import notes_of
from app.auth import Authenticator, Principal, Role
from app.errors import GatewayError, InvalidApiKey, PermissionDenied, dialect_of
from app.telemetry.metrics import Metrics

# A key with a thousand long patterns takes a quarter of that.
MAX_BODY_BYTES = 1_048_576
# The scope key of the caller's x-ratelimit-* headers, set once the limiter has decided.
CALLER_LIMITS = "gateway.caller_limits"


class Right(StrEnum):
    """Something that can be done under /admin."""

    SCHEMA_READ = "schema:read"
    KEYS_READ = "keys:read"
    KEYS_WRITE = "keys:write"
    OWNERS_READ = "owners:read"
    OWNERS_WRITE = "owners:write"
    USAGE_READ = "usage:read"
    ENGINES_READ = "engines:read"
    ENGINES_WRITE = "engines:write"
    LOGS_READ = "logs:read"
    LOGS_WRITE = "logs:write"


_READS = frozenset(
    {
        Right.SCHEMA_READ,
        Right.KEYS_READ,
        Right.OWNERS_READ,
        Right.USAGE_READ,
        Right.ENGINES_READ,
        Right.LOGS_READ,
    }
)

RIGHTS: Mapping[Role, frozenset[Right]] = {
    Role.CLIENT: frozenset(),
    Role.AUDITOR: _READS,
    Role.MANAGER: _READS | {Right.KEYS_WRITE},
    Role.ADMIN: frozenset(Right),
}
# Whose keys a role may make and change: never one that could do more than its maker.
HANDLES: Mapping[Role, frozenset[Role]] = {
    Role.CLIENT: frozenset(),
    Role.AUDITOR: frozenset(),
    Role.MANAGER: frozenset({Role.CLIENT}),
    Role.ADMIN: frozenset(Role),
}


def check_handles(principal: Principal, role: Role) -> None:
    """Raise PermissionDenied unless the caller may make and change keys of a role."""
    if role not in HANDLES[principal.role]:
        raise PermissionDenied(f"the role {principal.role} may not handle keys of the role {role}")


class Guard:
    """A dependency that lets in whoever has a right, and returns who that is."""

    def __init__(self, authenticator: Authenticator, right: Right) -> None:
        self._authenticator = authenticator
        self.right = right

    async def __call__(self, request: Request) -> Principal:
        """Raise InvalidApiKey, PermissionDenied or ServiceUnavailable, or return the caller."""
        principal = await self._authenticator.admin(request.scope["headers"])
        if self.right not in RIGHTS[principal.role]:
            raise PermissionDenied(
                f"the role {principal.role} does not have the right {self.right}"
            )
        return principal


def guard(authenticator: Authenticator, right: Right) -> Guard:
    """Return the dependency of the routes that need a right."""
    return Guard(authenticator, right)


def error_response(error: GatewayError, scope: Scope) -> Response:
    """Return an error as the callers of a path read one, and note it for the request's line."""
    notes_of(scope).fault = error.message
    pairs = [*error.headers(), *scope.get(CALLER_LIMITS, ())]
    headers = {name.decode(): value.decode() for name, value in pairs}
    body = error.body(dialect_of(scope["path"]))
    return Response(body, error.status, headers, media_type="application/json")


class AdminAuth:
    """Asks for a key before anything under /admin reads a body, says what is there, or is not.

    FastAPI reads and checks a body before it asks the dependencies of a route. Pure ASGI;
    `scope["path"]` never holds anything of the Host header.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator, metrics: Metrics) -> None:
        self._app = app
        self._authenticator = authenticator
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == "/admin" or path.startswith("/admin/")):
            await self._app(scope, receive, send)
            return
        try:
            principal = await self._authenticator.admin(scope["headers"])
            notes_of(scope).key_id = principal.id
        except GatewayError as error:
            if isinstance(error, InvalidApiKey):
                self._metrics.auth_failures.add((error.reason,))
            await error_response(error, scope)(scope, receive, send)
            return
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise HTTPException(413)
            return message

        await self._app(scope, bounded, send)
