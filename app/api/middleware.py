"""Bookkeeping for every request except the data plane's, which do their own. Pure ASGI."""

import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.asgi import REFUSED, Headers
from app.telemetry import CLIENT_CLOSED_REQUEST, UNKNOWN_MODEL, RequestRecord
from app.telemetry.logs import AccessLog, request_id
from app.telemetry.metrics import NO_ENDPOINT, Metrics

log = logging.getLogger(__name__)

NOTES = "gateway.notes"
# Polled every few seconds by machines: logged at debug level, and not counted.
QUIET = frozenset({"/health", "/ready", "/metrics", "/metrics/engines"})
# What a browser asks before it sends a page's request: logged at debug level, and not counted.
PREFLIGHT = "preflight"


@dataclass(slots=True)
class RequestNotes:
    """Fields of the access log that the handlers of a request fill in."""

    key_id: str = "-"
    model: str = UNKNOWN_MODEL
    engine: str | None = None
    fault: str | None = None


class AccessLogMiddleware:
    """Gives a request its id, returns that to the client, and writes the access line.

    The id is the client's x-request-id where that is harmless.
    """

    def __init__(self, app: ASGIApp, access: AccessLog, endpoint: str = NO_ENDPOINT) -> None:
        """`endpoint` is logged for a request that matches no route."""
        self._app = app
        self._access = access
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = perf_counter()
        name = request_id(scope["headers"])
        header = (b"x-request-id", name.encode())
        notes = scope[NOTES] = RequestNotes()
        status = CLIENT_CLOSED_REQUEST  # until there is a response
        bytes_in = bytes_out = 0
        complete = client_gone = False

        async def receive_counted() -> Message:
            nonlocal bytes_in, client_gone
            message = await receive()
            bytes_in += len(message.get("body", b""))
            client_gone |= message["type"] == "http.disconnect" and not complete
            return message

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal status, bytes_out, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), header]}
            else:
                bytes_out += len(message.get("body", b""))
                complete = not message.get("more_body", False)
            return send(message)

        try:
            await self._app(scope, receive_counted, send_with_id)
        except Exception:
            # FastAPI has sent what response it could, and raises the exception for logging.
            notes.fault = "internal error"
            log.exception("unhandled exception while serving request", extra={"request_id": name})
        finally:
            status = scope.get(REFUSED, status)
            endpoint = getattr(scope.get("route"), "path", self._endpoint)
            record = RequestRecord(
                name,
                endpoint,
                scope["method"],
                status,
                perf_counter() - began,
                key_id=notes.key_id,
                model=notes.model,
                engine=notes.engine,
                bytes_in=bytes_in,
                bytes_out=bytes_out,
                fault=notes.fault,
                client_gone=client_gone,
            )
            quiet = (
                endpoint in QUIET
                or endpoint == PREFLIGHT
                or _is_poll(record.method, scope["path"], status)
            )
            address, _ = scope.get("client") or ("", 0)
            self._access.write(record, quiet=quiet, peer=address)


def _is_poll(method: str, path: str, status: int) -> bool:
    """Return whether a request is a successful read that commands and open pages repeat."""
    return method == "GET" and status < 400 and path.startswith(("/admin/", "/console"))


def notes_of(scope: Scope) -> RequestNotes:
    """Return the notes of a scope's request for the access log."""
    notes: RequestNotes = scope[NOTES]
    return notes


class HeadMiddleware:
    """Handles HEAD as GET; the server leaves the body out (RFC 9110, section 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class PreflightMiddleware:
    """Logs the preflight requests that CORSMiddleware answers itself; passes on all others."""

    def __init__(self, cors: ASGIApp, access: AccessLog) -> None:
        self._cors = cors
        self._recorded = AccessLogMiddleware(cors, access, PREFLIGHT)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if (
            scope["type"] == "http"
            and scope["method"] == "OPTIONS"
            and is_preflight(scope["headers"])
        ):
            return self._recorded(scope, receive, send)
        return self._cors(scope, receive, send)


def is_preflight(headers: Headers) -> bool:
    """Return whether OPTIONS with these headers is a preflight request."""
    names = {name for name, _ in headers}
    return names >= {b"origin", b"access-control-request-method"}


class RequestMetricsMiddleware:
    """Counts and times requests by the route that they matched."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET:
            await self._app(scope, receive, send)
            return
        began = perf_counter()
        status = CLIENT_CLOSED_REQUEST

        def send_counted(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, send_counted)
        except Exception:
            status = 500
            raise
        finally:
            status = scope.get(REFUSED, status)
            self._metrics.record_request(
                UNKNOWN_MODEL, _endpoint(scope), status, perf_counter() - began
            )


def _endpoint(scope: Scope) -> str:
    """Return the route's path with the names of its parameters, never their values."""
    path: str = scope["path"]
    if path == "/admin" or path.startswith("/admin/"):
        return "/admin"
    endpoint: str = getattr(scope.get("route"), "path", NO_ENDPOINT)
    return endpoint
