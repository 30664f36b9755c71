"""The way of one request, from its headers to the last byte of its answer.

Every resource of a request (the watch on the client, the permit, the lease, the connection to the
engine) is entered into one stack in `Relay.serve` and released when that is left: on success,
error and disconnect alike. Then the request is counted and logged, exactly once.
"""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import perf_counter
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from app.admission import Admission
from app.auth.keys import Authenticator
from app.errors import EngineUnavailable, GatewayError, InvalidApiKey, dialect_of
from app.relay.answer import Exchange, Truncated, relay, send_error, send_error_event
from app.relay.attempts import Attempts
from app.relay.body import parse
from app.relay.disconnect import ClientDisconnected, DisconnectWatch
from app.routing.catalogue import Catalogue
from app.telemetry.logs import UNKNOWN_MODEL, RequestRecord, access
from app.telemetry.metrics import Metrics
from engines.base import EngineRequest

log = logging.getLogger(__name__)

# nginx's status for a client that closed its connection; there is nobody left to send it to.
CLIENT_CLOSED_REQUEST = 499
SHUTTING_DOWN = "the gateway is shutting down; try again"
# What an engine may see of a request's headers. Keys, cookies and addresses are not its business.
PASSED_ON = frozenset(
    {
        b"accept", b"anthropic-beta", b"anthropic-version", b"content-type", b"traceparent",
        b"tracestate",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route of the data plane. `label` is its bounded name in metrics and logs."""

    label: str
    methods: tuple[str, ...] = ("POST",)
    # False: the request names a stored thing by its id, not a model.
    names_model: bool = True


@dataclass(frozen=True, slots=True)
class Relay:
    """The rooms that a request passes through."""

    authenticator: Authenticator
    admission: Admission
    catalogue: Catalogue
    attempts: Attempts
    metrics: Metrics

    async def serve(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever becomes of it. Raises nothing."""
        record = RequestRecord(scope["state"]["request_id"], endpoint.label, perf_counter())
        exchange = Exchange(scope, send, record, dialect_of(scope["path"]))
        serve = self._serve_model if endpoint.names_model else self._serve_stored
        try:
            record.principal = self.authenticator.authenticate(scope["headers"]).id
            raw = await read_body(receive)
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(DisconnectWatch(receive))
                await serve(exchange, raw, stack)
        except ClientDisconnected:
            record.status = CLIENT_CLOSED_REQUEST
            self.metrics.disconnect()
        except asyncio.CancelledError:
            # uvicorn cancels what the drain did not see end; the task ends here in any case
            record.fault = "cut by the shutdown"
            if exchange.streaming:
                await send_error_event(EngineUnavailable(SHUTTING_DOWN), exchange)
            elif record.status == 0:  # the head has not left
                await send_error(EngineUnavailable(SHUTTING_DOWN), exchange)
        except Truncated as fault:
            record.fault = str(fault)
        except GatewayError as error:
            if isinstance(error, InvalidApiKey):
                self.metrics.auth_failure(error.reason)
            record.fault = error.message
            await send_error(error, exchange)
        except Exception:
            log.exception("request %s failed in a way nobody thought of", record.request_id)
            record.fault = "internal error"
            if record.status == 0:  # the head has not left
                await send_error(
                    GatewayError("internal error; the request id leads to it"), exchange
                )
        finally:
            seconds = perf_counter() - record.started
            self.metrics.request(record.model, endpoint.label, record.status, seconds)
            access.info(record.line(seconds))

    async def _serve_model(self, exchange: Exchange, raw: bytes, stack: AsyncExitStack) -> None:
        """Serve a request whose body names a model."""
        arrived = perf_counter()
        record = exchange.record
        parsed = parse(_header(exchange.scope, b"content-type"), raw)
        model = self.catalogue.find(parsed.model)
        record.model = model.name
        await stack.enter_async_context(self.admission.permit(model.name))

        def request_for(served_name: str) -> EngineRequest:
            return _engine_request(exchange, parsed.for_engine(served_name))

        self.metrics.overhead(model.name, perf_counter() - arrived)
        replica, answer = await self.attempts.first_answer(model, request_for, stack)
        record.engine = replica.engine.name
        try:
            await relay(answer, exchange)
        finally:
            if record.ttft_s is not None:
                self.metrics.first_token(model.name, record.ttft_s)

    async def _serve_stored(self, exchange: Exchange, raw: bytes, stack: AsyncExitStack) -> None:
        """Serve a request for something that one of the engines keeps."""
        await stack.enter_async_context(self.admission.permit(UNKNOWN_MODEL))
        request = _engine_request(exchange, raw)
        models = self.catalogue.models
        replica, answer = await self.attempts.first_that_knows(models, request, stack)
        exchange.record.engine = replica.engine.name
        await relay(answer, exchange)


async def read_body(receive: Receive) -> bytes:
    """Return the whole body of a request.

    Raises ClientDisconnected, and what `receive` raises: RequestTooLarge, from the middleware.
    """
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _engine_request(exchange: Exchange, body: bytes) -> EngineRequest:
    scope = exchange.scope
    target = quote(scope["path"])
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    headers = [pair for pair in scope["headers"] if pair[0] in PASSED_ON]
    headers.append((b"x-request-id", exchange.record.request_id.encode()))
    return EngineRequest(scope["method"], target, headers, body)


def _header(scope: Scope, wanted: bytes) -> bytes:
    for name, value in scope["headers"]:
        if name == wanted:
            found: bytes = value
            return found
    return b""
