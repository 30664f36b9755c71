"""Every request of the data plane, from its headers until it is counted.

The caller is authenticated, the body is read, the request is served (`serving.py`), and the client
is told what went wrong. A client that disconnects, and a key that is cut off, cancel the task of
the request. Then the request is counted, put into the ledger and logged, exactly once.
"""

import asyncio
import logging
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from app.asgi import ClientDisconnected, ClientExchange, ClientStalled
from app.auth.authenticator import Authenticator
from app.errors import (
    EngineUnavailable,
    GatewayError,
    InvalidApiKey,
    MethodNotAllowed,
    RateLimited,
)
from app.relay.request_handler import RequestHandler
from app.relay.response import Truncated, send_error
from app.relay.services import Endpoint, RelayServices
from app.telemetry.logs.access import AccessLog, RequestRecord
from app.usage.ledger import Ledger, UsageRecord

if TYPE_CHECKING:  # OpenTelemetry is imported only where traces go somewhere
    from app.telemetry.traces.tracer import Tracer

log = logging.getLogger(__name__)

# nginx's status for a client that closed its connection; there is nobody left to send it to.
CLIENT_CLOSED_REQUEST = 499
SHUTTING_DOWN = "the gateway is shutting down; try again"


@dataclass(slots=True)
class Relay:
    """Answers requests; what all of them share."""

    authenticator: Authenticator
    rooms: RelayServices
    ledger: Ledger
    access: AccessLog
    tracer: "Tracer | None" = None

    async def serve(self, endpoint: Endpoint, exchange: ClientExchange) -> None:
        """Answer one request, whatever becomes of it. Raises nothing."""
        record = exchange.record
        record.endpoint = endpoint.label
        exchange.stall_s = self.rooms.bounds.client_stall_s
        if self.tracer is not None:
            self.tracer.begin(record, exchange.method, exchange.headers)
        try:
            if exchange.method not in endpoint.methods:
                await self._tell_methods(endpoint, exchange)
                return
            principal = self.authenticator.recall(exchange.headers)
            if principal is None:
                principal = await self.authenticator.look_up(exchange.headers)
            record.principal = principal.id
            record.owner = principal.owner
            if record.trace is not None:
                record.trace.end()
            await RequestHandler(self.rooms, endpoint, principal, exchange).run()
        except asyncio.CancelledError:
            await self._interrupted(exchange)
        except (Truncated, ClientStalled) as fault:
            record.fault = str(fault)
            record.error = fault.code
            record.client_gone = isinstance(fault, ClientStalled)
        except GatewayError as error:
            await self._refuse(error, exchange)
        except Exception:
            told = {"request_id": record.request_id, "model": record.model, "engine": record.engine}
            log.exception("a request failed in a way nobody thought of", extra=told)
            record.fault = "internal error"
            record.error = GatewayError.code
            await self._tell(GatewayError("internal error; the request id leads to it"), exchange)
        finally:
            self._note(endpoint, record)

    async def _interrupted(self, exchange: ClientExchange) -> None:
        """End a request that was cancelled: its client left, its key was cut off, or we stop."""
        record = exchange.record
        fault = exchange.take_fault()
        if isinstance(fault, GatewayError):
            await self._refuse(fault, exchange)
        elif isinstance(fault, ClientDisconnected):
            self._note_disconnect(exchange)
        else:
            # The server cancels what the drain did not see end; the task ends here in any case, and
            # before the ledger does: a client that does not read is not waited for.
            exchange.stall_s = 0.0
            record.fault = "cut by the shutdown"
            record.error = "shutdown"
            await self._tell(EngineUnavailable(SHUTTING_DOWN), exchange)

    def _note_disconnect(self, exchange: ClientExchange) -> None:
        record = exchange.record
        record.status = exchange.refused_status or CLIENT_CLOSED_REQUEST
        record.error = str(record.status)
        if record.status == CLIENT_CLOSED_REQUEST:
            record.error = "client_disconnected"
            record.client_gone = True
            self.rooms.metrics.client_disconnects.add()

    async def _refuse(self, error: GatewayError, exchange: ClientExchange) -> None:
        """Note an error and tell the client of it."""
        record, metrics = exchange.record, self.rooms.metrics
        if isinstance(error, InvalidApiKey):
            metrics.auth_failures.add((error.reason,))
        elif isinstance(error, RateLimited):
            metrics.rate_limited.add((error.limit,))
        record.fault = error.message
        record.error = error.code
        await self._tell(error, exchange)

    async def _tell_methods(self, endpoint: Endpoint, exchange: ClientExchange) -> None:
        """Answer OPTIONS, from anybody. Raises MethodNotAllowed for every other method."""
        allowed = ", ".join(endpoint.methods)
        if exchange.method != "OPTIONS":
            raise MethodNotAllowed(f"{exchange.path} takes {allowed}", allowed)
        await exchange.start_response(204, [(b"allow", f"{allowed}, OPTIONS".encode())])
        await exchange.send_body(b"", more=False)

    async def _tell(self, error: GatewayError, exchange: ClientExchange) -> None:
        """Tell the client of a fault, unless it does not even read that."""
        try:
            await send_error(exchange, error)
        except ClientStalled as fault:
            told = {"request_id": exchange.record.request_id}
            log.debug("the client was not told of a fault: %s", fault, extra=told)
        except asyncio.CancelledError:
            if isinstance(exchange.take_fault(), ClientDisconnected):
                self._note_disconnect(exchange)

    def _note(self, endpoint: Endpoint, record: RequestRecord) -> None:
        """Count the request and write its line."""
        metrics = self.rooms.metrics
        seconds = perf_counter() - record.started
        metrics.record_request(record.model, record.endpoint, record.status, seconds)
        if record.engine is not None:
            ended = outcome(record)
            tokens = record.usage if endpoint.metered else None
            metrics.record_usage(record.model, ended, tokens)
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
                    record.owner,
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
