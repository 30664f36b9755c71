"""The way of one request, from its headers to the last byte of its answer.

Every resource of a request (the watch on the client, the permit, the lease with the connection to
the engine) is a `with` statement below `Relay.serve` and released when that is left: on success,
error and disconnect alike. Then the request is counted and logged, exactly once.
"""

import asyncio
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter

from starlette.types import Receive, Scope, Send

from app.admission import Admission
from app.auth.keys import Authenticator
from app.auth.principal import Principal
from app.errors import (
    EngineUnavailable,
    GatewayError,
    InvalidApiKey,
    MethodNotAllowed,
    RequestTooLarge,
    dialect_of,
)
from app.relay.answer import Truncated, as_gateway_error, head_of, relay_plain
from app.relay.attempts import Attempts
from app.relay.body import ParsedBody, parse
from app.relay.disconnect import ClientDisconnected, DisconnectWatch
from app.relay.exchange import ClientStalled, Exchange
from app.relay.rewrite import NOTHING, Rewrite, is_stream, rewrite
from app.relay.stream import EventStream, KeepAlive
from app.routing.catalogue import Catalogue, Model, Replica
from app.telemetry.access import UNKNOWN_MODEL, AccessLog, RequestRecord, request_id
from app.telemetry.metrics import Metrics
from app.usage.meter import StreamMeter
from engines.base import EngineError, EngineRequest, EngineResponse

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
    # False: the answer takes no tokens of the model.
    metered: bool = True


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What one request may take of the gateway."""

    body_bytes: int
    # How long a client may leave unread what waits for it.
    client_stall_s: float
    # After how much silence a stream gets a comment; None: never.
    keepalive_s: float | None


@dataclass(frozen=True, slots=True)
class Relay:
    """The rooms that a request passes through."""

    authenticator: Authenticator
    admission: Admission
    catalogue: Catalogue
    attempts: Attempts
    metrics: Metrics
    access: AccessLog
    limits: RelayLimits

    async def serve(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever becomes of it. Raises nothing."""
        path = scope["path"]
        record = RequestRecord(request_id(scope["headers"]), endpoint.label, perf_counter())
        exchange = Exchange(scope, send, record, dialect_of(path), self.limits.client_stall_s)
        serve = self._serve_model if endpoint.names_model else self._serve_stored
        try:
            if scope["method"] not in endpoint.methods:
                allowed = ", ".join(endpoint.methods)
                raise MethodNotAllowed(f"{path} takes {allowed}", allowed)  # noqa: TRY301
            headers = scope["headers"]
            caller = self.authenticator.recall(headers)
            if caller is None:
                caller = await self.authenticator.look_up(headers)
            record.principal = caller.id
            raw = await read_body(exchange, receive, self.limits.body_bytes)
            with DisconnectWatch(receive, exchange):
                await serve(exchange, raw, caller)
        except ClientDisconnected:
            record.status = CLIENT_CLOSED_REQUEST
            self.metrics.disconnect()
        except asyncio.CancelledError:
            # uvicorn cancels what the drain did not see end; the task ends here in any case
            record.fault = "cut by the shutdown"
            await self._tell(EngineUnavailable(SHUTTING_DOWN), exchange)
        except (Truncated, ClientStalled) as fault:
            record.fault = str(fault)
        except GatewayError as error:
            if isinstance(error, InvalidApiKey):
                self.metrics.auth_failure(error.reason)
            record.fault = error.message
            await self._tell(error, exchange)
        except Exception:
            log.exception("request %s failed in a way nobody thought of", record.request_id)
            record.fault = "internal error"
            await self._tell(GatewayError("internal error; the request id leads to it"), exchange)
        finally:
            self._note(endpoint, record)

    async def _serve_model(self, exchange: Exchange, raw: bytes, caller: Principal) -> None:
        """Serve a request whose body names a model."""
        arrived = perf_counter()
        record = exchange.record
        body = parse(exchange.header(b"content-type"), raw)
        model = self.catalogue.find(body.model, caller.allows)
        record.model = model.name
        record.bytes_in = len(raw)
        plan = rewrite(record.endpoint, body.members, model.bounds) if body.members else NOTHING
        quiet_s = self.limits.keepalive_s
        awake = (
            KeepAlive(exchange, quiet_s) if quiet_s and is_stream(body.members) else nullcontext()
        )
        with self.admission.permit(model.name), awake:
            self.metrics.overhead(model.name, perf_counter() - arrived)
            await self._relay_model(exchange, body, model, plan)

    async def _relay_model(
        self, exchange: Exchange, body: ParsedBody, model: Model, plan: Rewrite
    ) -> None:
        """Have one of a model's engines answer, and note what that took."""
        record = exchange.record

        def request_for(replica: Replica) -> EngineRequest:
            record.engine = replica.engine.name
            return _engine_request(exchange, body.for_engine(replica.served_name, plan.changes))

        meter = StreamMeter(withhold=plan.withhold_usage, one_choice=plan.one_choice)
        left = False
        try:
            lease = await self.attempts.first_answer(model, request_for)
            with lease as answer:
                meter.fingerprint = lease.replica.fingerprint
                await self._relay(answer, exchange, meter, model.name)
                lease.replica.fingerprint = meter.fingerprint
        except asyncio.CancelledError:
            left = True
            raise
        finally:
            usage = meter.usage
            if left or (meter.events and (usage is None or not exchange.complete)):
                usage = meter.so_far(record.bytes_in, model.max_model_len)
            record.usage = usage
            if record.ttft_s is not None:
                self.metrics.first_token(model.name, record.ttft_s)

    async def _serve_stored(self, exchange: Exchange, raw: bytes, caller: Principal) -> None:
        """Serve a request for something that one of the engines keeps."""
        models = [model for model in self.catalogue.models if caller.allows(model.name)]
        with self.admission.permit(UNKNOWN_MODEL):
            request = _engine_request(exchange, raw)
            lease = await self.attempts.first_that_knows(models, request)
            with lease as answer:
                exchange.record.engine = lease.replica.engine.name
                await self._relay(answer, exchange, StreamMeter(), UNKNOWN_MODEL)

    async def _relay(
        self, answer: EngineResponse, exchange: Exchange, meter: StreamMeter, model: str
    ) -> None:
        """Carry an answer to the client. Raises GatewayError, or Truncated once its head left."""
        head = head_of(answer)
        if not head.is_stream:
            meter.usage = await relay_plain(answer, exchange, head.headers)
            return
        try:
            await EventStream(answer, exchange, meter, self.metrics.gaps(model)).run(head.headers)
        except EngineError as error:
            await exchange.fail(as_gateway_error(error))
            raise Truncated(str(error)) from None

    async def _tell(self, error: GatewayError, exchange: Exchange) -> None:
        """Tell the client of a fault, unless it does not even read that."""
        try:
            await exchange.fail(error)
        except ClientStalled as fault:
            log.debug("request %s: %s", exchange.record.request_id, fault)

    def _note(self, endpoint: Endpoint, record: RequestRecord) -> None:
        """Count the request and write its line."""
        seconds = perf_counter() - record.started
        self.metrics.request(record.model, record.endpoint, record.status, seconds)
        if record.engine is not None and endpoint.metered:
            self.metrics.usage(record.model, outcome(record), record.usage)
        self.access.write(record, seconds)


def outcome(record: RequestRecord) -> str:
    """Return how a request ended that reached an engine, as one of four words."""
    if record.status == CLIENT_CLOSED_REQUEST:
        return "disconnected"
    if record.fault is not None or record.status >= 500:
        return "failed"
    return "refused" if record.status >= 400 else "completed"


async def read_body(exchange: Exchange, receive: Receive, limit: int) -> bytes:
    """Return the whole body of a request of up to `limit` bytes.

    Raises RequestTooLarge and ClientDisconnected. Of a body that is too large the server goes on
    reading what still comes and throws it away: closing at once would reset the connection, and the
    client would see that instead of the answer.
    """
    # A length that is not a number was refused by the server's parser already.
    if int(exchange.header(b"content-length") or 0) > limit:
        raise RequestTooLarge(f"the request body is over the limit of {limit} bytes")
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise RequestTooLarge(f"the request body is over the limit of {limit} bytes")
        pieces.append(piece)
        if not message.get("more_body", False):
            return piece if len(pieces) == 1 else b"".join(pieces)


def _engine_request(exchange: Exchange, body: bytes) -> EngineRequest:
    scope = exchange.scope
    target: str = scope["path"]  # one of the allow-list's, so it needs no quoting
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    headers = [pair for pair in scope["headers"] if pair[0] in PASSED_ON]
    headers.append((b"x-request-id", exchange.record.request_id.encode()))
    return EngineRequest(scope["method"], target, headers, body)
