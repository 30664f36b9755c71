"""Every request of the data plane, from its headers until it is counted.

The caller is authenticated, the request is served (`request_handler.py`), and a fault becomes a
response. A client that disconnects and a key that is disabled cancel the task of the request. Then
the request is counted, put into the ledger and logged, exactly once.
"""

import asyncio
import logging
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from app.asgi import ClientDisconnected, ClientExchange, ClientStalled
from app.auth import Principal
from app.errors import (
    GatewayError,
    Headers,
    InvalidApiKey,
    MethodNotAllowed,
    RateLimited,
    UpgradeNotOffered,
    shutting_down,
)
from app.head_facts import HeadFacts
from app.relay.request_context import RequestContext
from app.relay.request_handler import handle_request
from app.relay.response import Truncated, send_error
from app.relay.services import RelayServices
from app.request_body import Endpoint
from app.telemetry import CLIENT_CLOSED_REQUEST, RequestRecorder
from app.telemetry.logs import AccessLog
from app.usage import Ledger

log = logging.getLogger(__name__)


class CallerLookup(Protocol):
    """Authenticates requests by their headers."""

    def recall(self, headers: Headers, facts: HeadFacts) -> Principal | None:
        """Return the caller if that takes no wait, else None. Raises GatewayError."""

    async def look_up(self, headers: Headers) -> Principal:
        """Return the caller. Raises GatewayError."""


@dataclass(slots=True, kw_only=True)
class Relay:
    """Serves requests; holds what all of them share."""

    authenticator: CallerLookup
    services: RelayServices
    ledger: Ledger
    access: AccessLog
    recorder: RequestRecorder

    async def serve(self, endpoint: Endpoint, exchange: ClientExchange) -> None:
        """Serve one request to its end. Raises nothing."""
        services, headers = self.services, exchange.headers
        exchange.stall_s = services.bounds.client_stall_s
        timeline = self.recorder.begin(exchange.method, headers, exchange.received_at)
        request = RequestContext(exchange, endpoint, timeline)
        try:
            if exchange.method not in endpoint.methods:
                await _send_allowed_methods(endpoint, exchange)
                return
            principal = self.authenticator.recall(headers, exchange.facts)
            if principal is None:
                principal = await self.authenticator.look_up(headers)
                timeline.note_authenticated()
            request.principal = principal
            # Before the first wait: from now on the request is listed, and may be canceled.
            services.in_flight.add(request)
            await handle_request(services, request)
        except asyncio.CancelledError:
            await self._end_canceled(request)
        except (Truncated, ClientStalled) as fault:
            request.fault = str(fault)
            request.error = fault.code
            request.client_gone = isinstance(fault, ClientStalled)
        except GatewayError as error:
            await self._refuse(error, request)
        except Exception:
            log.exception("unhandled exception while serving request", extra=request.log_fields)
            request.fault = "internal error"
            request.error = GatewayError.code
            await self._send_error(
                GatewayError("internal error; the request id leads to it"), request
            )
        finally:
            services.in_flight.discard(request)
            self._finish(request)

    async def _end_canceled(self, request: RequestContext) -> None:
        """End a request that was canceled: by a disconnect, a disabled key, or the shutdown."""
        fault = request.exchange.take_fault()
        if isinstance(fault, GatewayError):
            await self._refuse(fault, request)
        elif isinstance(fault, ClientDisconnected):
            self._note_disconnect(request)
        else:
            # The server cancels what is left after the drain. The task must end before the ledger
            # closes: no time is left for a slow client.
            request.exchange.stall_s = 0.0
            request.fault = "cut by the shutdown"
            request.error = "shutdown"
            await self._send_error(shutting_down(), request)

    def _note_disconnect(self, request: RequestContext) -> None:
        if request.stream_ended:
            return
        refused = request.exchange.refused_status
        if refused is not None:
            request.aborted_status, request.error = refused, str(refused)
            return
        request.aborted_status, request.error = CLIENT_CLOSED_REQUEST, "client_disconnected"
        request.client_gone = True
        self.services.metrics.client_disconnects.add()

    async def _refuse(self, error: GatewayError, request: RequestContext) -> None:
        """Note an error and send it to the client."""
        metrics = self.services.metrics
        if isinstance(error, InvalidApiKey):
            metrics.auth_failures.add((error.reason,))
        elif isinstance(error, RateLimited):
            metrics.rate_limited.add((error.limit,))
        request.fault = error.message
        request.error = error.code
        await self._send_error(error, request)

    async def _send_error(self, error: GatewayError, request: RequestContext) -> None:
        """Send an error to the client, unless it has disconnected or stopped reading."""
        try:
            await send_error(request, error)
        except ClientStalled as fault:
            log.debug("error response not sent: %s", fault, extra=request.log_fields)
        except asyncio.CancelledError:
            if isinstance(request.exchange.take_fault(), ClientDisconnected):
                self._note_disconnect(request)

    def _finish(self, request: RequestContext) -> None:
        """Count a request that has ended, in metrics, ledger, timelines and log."""
        exchange = request.exchange
        record = request.record(perf_counter() - exchange.received_at)
        self.services.metrics.record(record)
        ended = self.ledger.end(record, request.timeline)
        self.recorder.end(ended)
        if request.capture is not None:
            self.services.captures.end(request.capture, ended, stream=exchange.streaming)
        self.access.write(record, peer=exchange.peer if record.engine is None else "")


async def _send_allowed_methods(endpoint: Endpoint, exchange: ClientExchange) -> None:
    """Answer OPTIONS, without a key. Raises GatewayError for every other method."""
    allowed = ", ".join(endpoint.methods)
    # The connection has removed the Upgrade header (RFC 6455, section 4.1, requires this one).
    if exchange.method == "GET" and exchange.header(b"sec-websocket-version"):
        raise UpgradeNotOffered(f"there is no WebSocket here; send a {allowed} to {exchange.path}")
    if exchange.method != "OPTIONS":
        raise MethodNotAllowed(f"{exchange.path} takes {allowed}", allowed)
    await exchange.start_response(204, [(b"allow", f"{allowed}, OPTIONS".encode())])
    await exchange.send_body(b"", more=False)
