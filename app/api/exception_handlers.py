"""Error responses for exceptions in FastAPI's routes; the relay sends its own."""

import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from app import errors
from app.api.admin_auth import MAX_BODY_BYTES, error_response
from app.api.data_plane import endpoint_of
from app.auth import NameTaken, TooManyKeys, UnknownKey, UnknownOwner, faults
from app.database import DatabaseBusy, DatabaseUnavailable, ValuesRejected

log = logging.getLogger(__name__)

# Paths for client keys that are not the data plane's.
CLIENT_PATHS = frozenset({"/v1/models", "/v1/usage", "/version"})
# Paths that agents try, with what they do instead.
UNSERVED = {
    "/v1/responses/compact": "vLLM does not serve it; ask for a summary with POST /v1/responses"
}
_SLASHES = re.compile("//+")


async def _gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.GatewayError)
    return error_response(error, request.scope)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path: str = request.scope["path"]
    known: errors.GatewayError
    if error.status_code == 405:
        allowed = _methods(request)
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"allow": f"{allowed}, OPTIONS"})
        known = errors.MethodNotAllowed(f"{path} takes {allowed}", allowed)
    elif error.status_code == 404:
        hint = UNSERVED.get(path)
        if hint is None and (meant := suggested_path(path)) is not None:
            hint = f"did you mean {meant}?"
        known = errors.RouteNotFound(f"there is no {path} here{f'; {hint}' if hint else ''}")
    elif error.status_code == 413:
        known = errors.RequestTooLarge(f"the body is over the limit of {MAX_BODY_BYTES} bytes")
    elif error.status_code == 400:
        known = errors.InvalidJson("the body is not JSON that can be read")
    else:
        known = errors.GatewayError(str(error.detail))
    return error_response(known, request.scope)


def suggested_path(path: str) -> str | None:
    """Return the path that a client meant, by its `base_url`.

    That has one /v1 too few or too many, or a slash at its end.
    """
    single = _SLASHES.sub("/", path).rstrip("/")
    for meant in (single, f"/v1{single}", single.removeprefix("/v1")):
        listed = meant in CLIENT_PATHS or meant.startswith("/v1/models/")
        if meant != path and (listed or endpoint_of(meant) is not None):
            return meant
    return None


def _methods(request: Request) -> str:
    """Return all methods of a path; Starlette's Allow lists only those of the first route."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    matching = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return ", ".join(sorted({method for route in matching for method in route.methods or ()}))


async def _invalid(request: Request, error: Exception) -> Response:
    """Name the first invalid field and what it must be; never what was sent."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = first["loc"][1:]  # without `body` or `query`
    known: errors.GatewayError
    if first["type"] == "json_invalid":
        known = errors.InvalidJson("the body is not JSON")
    elif not place and first["type"] != "value_error":
        known = errors.BadRequest("the body must be a JSON object, with its content type")
    else:
        known = errors.BadRequest(faults([{**first, "loc": place}])[0])
    return error_response(known, request.scope)


async def _database(request: Request, error: Exception) -> Response:
    text = str(error)
    if not isinstance(error, DatabaseBusy):
        # Not "/admin/keys: the …", which looks like a secret with its name.
        log.warning("%s %s failed: %s", request.method, request.scope["path"], error)
        text = "the database does not answer (the gateway's log has the reason)"
    known = errors.ServiceUnavailable(f"{text}; try again")
    return error_response(known, request.scope)


async def _values_rejected(request: Request, error: Exception) -> Response:
    log.warning("%s %s failed: %s", request.method, request.scope["path"], error)
    known = errors.BadRequest("the database rejected these values; retrying will not help")
    return error_response(known, request.scope)


async def _refused_value(request: Request, error: Exception) -> Response:
    return error_response(errors.BadRequest(str(error)), request.scope)


async def _unknown(request: Request, error: Exception) -> Response:
    return error_response(errors.RouteNotFound(str(error)), request.scope)


async def _unexpected(request: Request, _: Exception) -> Response:
    return error_response(errors.GatewayError("internal error"), request.scope)


ExceptionHandler = Callable[[Request, Exception], Coroutine[Any, Any, Response]]
EXCEPTION_HANDLERS: Mapping[int | type[Exception], ExceptionHandler] = {
    errors.GatewayError: _gateway_error,
    HTTPException: _http_exception,
    RequestValidationError: _invalid,
    DatabaseUnavailable: _database,
    ValuesRejected: _values_rejected,
    NameTaken: _refused_value,
    TooManyKeys: _refused_value,
    UnknownKey: _unknown,
    UnknownOwner: _unknown,
    Exception: _unexpected,
}
