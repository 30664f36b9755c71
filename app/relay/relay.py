"""Every request of the data plane, from its headers until it is counted.

Who asks is found out, the body is read, the request is served (`serving.py`) while somebody watches
whether the client leaves, and what went wrong is told. Then the request is counted, put into the
ledger and logged, exactly once.
"""

import asyncio
import logging
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from app.auth.keys import Authenticator
from app.errors import (
    EngineUnavailable,
    GatewayError,
    InvalidApiKey,
    MethodNotAllowed,
    RateLimited,
    dialect_of,
)
from app.relay.answer import Truncated
from app.relay.disconnect import ClientDisconnected
from app.relay.exchange import REFUSED, ClientStalled, Exchange
from app.relay.rooms import Endpoint, Rooms
from app.relay.serving import Serving
from app.telemetry.access import AccessLog, RequestRecord, request_id
from app.usage.ledger import Ledger, UsageRecord

if TYPE_CHECKING:  # OpenTelemetry is imported only where traces go somewhere
    from app.telemetry.tracing import Tracer

log = logging.getLogger(__name__)

# nginx's status for a client that closed its connection; there is nobody left to send it to.
CLIENT_CLOSED_REQUEST = 499
SHUTTING_DOWN = "the gateway is shutting down; try again"


@dataclass(slots=True)
class Relay:
    """Answers requests; what all of them share."""

    authenticator: Authenticator
    rooms: Rooms
    ledger: Ledger
    access: AccessLog
    tracer: "Tracer | None" = None

    async def serve(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever becomes of it. Raises nothing."""
        record = RequestRecord(request_id(scope["headers"]), endpoint.label, perf_counter())
        record.method = scope["method"]
        if self.tracer is not None:
            self.tracer.begin(record, scope["method"], scope["headers"])
        metrics, bounds = self.rooms.metrics, self.rooms.bounds
        dialect = dialect_of(scope["path"])
        exchange = Exchange(scope, send, record, dialect, bounds.client_stall_s)
        try:
            if scope["method"] not in endpoint.methods:
                await self._tell_methods(endpoint, exchange)
                return
            principal = self.authenticator.recall(scope["headers"])
            if principal is None:
                principal = await self.authenticator.look_up(scope["headers"])
            record.principal = principal.id
            if record.trace is not None:
                record.trace.end()
            await Serving(self.rooms, endpoint, principal, exchange, receive).run()
        except ClientDisconnected:
            record.status = scope.get(REFUSED, CLIENT_CLOSED_REQUEST)
            record.error = str(record.status)
            if record.status == CLIENT_CLOSED_REQUEST:
                record.error = "client_disconnected"
                record.client_gone = True
                metrics.disconnect()
        except asyncio.CancelledError:
            # uvicorn cancels what the drain did not see end; the task ends here in any case
            record.fault = "cut by the shutdown"
            record.error = "shutdown"
            await self._tell(EngineUnavailable(SHUTTING_DOWN), exchange)
        except (Truncated, ClientStalled) as fault:
            record.fault = str(fault)
            record.error = fault.code
            record.client_gone = isinstance(fault, ClientStalled)
        except GatewayError as error:
            if isinstance(error, InvalidApiKey):
                metrics.auth_failure(error.reason)
            elif isinstance(error, RateLimited):
                metrics.rate_limited(error.limit)
            record.fault = error.message
            record.error = error.code
            await self._tell(error, exchange)
        except Exception:
            told = {"request_id": record.request_id, "model": record.model, "engine": record.engine}
            log.exception("a request failed in a way nobody thought of", extra=told)
            record.fault = "internal error"
            record.error = GatewayError.code
            await self._tell(GatewayError("internal error; the request id leads to it"), exchange)
        finally:
            self._note(endpoint, record)

    async def _tell_methods(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """Answer OPTIONS, from anybody. Raises MethodNotAllowed for every other method."""
        allowed = ", ".join(endpoint.methods)
        if exchange.scope["method"] != "OPTIONS":
            raise MethodNotAllowed(f"{exchange.scope['path']} takes {allowed}", allowed)
        await exchange.start(204, [(b"allow", f"{allowed}, OPTIONS".encode())])
        await exchange.body(b"", more=False)

    async def _tell(self, error: GatewayError, exchange: Exchange) -> None:
        """Tell the client of a fault, unless it does not even read that."""
        try:
            await exchange.fail(error)
        except ClientStalled as fault:
            told = {"request_id": exchange.record.request_id}
            log.debug("the client was not told of a fault: %s", fault, extra=told)

    def _note(self, endpoint: Endpoint, record: RequestRecord) -> None:
        """Count the request and write its line."""
        metrics = self.rooms.metrics
        seconds = perf_counter() - record.started
        metrics.request(record.model, record.endpoint, record.status, seconds)
        if record.engine is not None:
            ended = outcome(record)
            tokens = record.usage if endpoint.metered else None
            metrics.usage(record.model, ended, tokens)
            self.ledger.add(
                UsageRecord(
                    record.request_id,
                    record.principal,
                    record.model,
                    record.engine,
                    record.endpoint,
                    record.status,
                    ended,
                    record.usage,
                    record.queued_s,
                    record.ttft_s,
                    seconds,
                )
            )
        if record.trace is not None and self.tracer is not None:
            self.tracer.end(record, record.trace, seconds)
        self.access.write(record, seconds)


def outcome(record: RequestRecord) -> str:
    """Return how a request ended that reached an engine, as one of four words."""
    if record.status == CLIENT_CLOSED_REQUEST:
        return "disconnected"
    if record.fault is not None or record.status >= 500:
        return "failed"
    return "refused" if record.status >= 400 else "completed"
