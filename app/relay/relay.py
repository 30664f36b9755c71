"""The way of one request, from its headers to the last byte of its answer.

Every resource of a request (the watch on the client, its share of limits and budget, the hold on a
model that is loaded on demand, the permit, the lease with the connection to the engine) is a `with`
statement below `Relay.serve` and released when that is left: on success, error and disconnect
alike. Then the request is counted, put into the ledger and logged, exactly once.
"""

import asyncio
import logging
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Self

from starlette.types import Receive, Scope, Send

from app.admission.admission import Admission, Permit
from app.auth.keys import Authenticator
from app.auth.principal import Principal
from app.errors import (
    EngineOverloaded,
    EngineUnavailable,
    GatewayError,
    InvalidApiKey,
    MethodNotAllowed,
    RateLimited,
    RequestTooLarge,
    RouteNotFound,
    dialect_of,
)
from app.limits.limiter import Limiter
from app.limits.terms import Ask
from app.relay.answer import Truncated, as_gateway_error, head_of, relay_plain
from app.relay.attempts import Attempts
from app.relay.body import ParsedBody, parse
from app.relay.charge import Charge
from app.relay.cost import most_tokens
from app.relay.disconnect import ClientDisconnected, DisconnectWatch
from app.relay.exchange import ClientStalled, Exchange
from app.relay.rewrite import NOTHING, Rewrite, is_stream, rewrite
from app.relay.stream import EventStream, KeepAlive
from app.residency.keeper import Hold, Keeper
from app.routing.catalogue import Catalogue, Model, Replica
from app.settings import NO_LIMITS, Settings
from app.telemetry.access import UNKNOWN_MODEL, AccessLog, RequestRecord, request_id
from app.telemetry.metrics import Metrics
from app.usage.budgets import Budgets
from app.usage.ledger import Ledger, UsageRecord
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
class RelayBounds:
    """What one request may take of the gateway."""

    body_bytes: int
    # How long a client may leave unread what waits for it.
    client_stall_s: float
    # After how much silence a stream gets a comment; None: never.
    keepalive_s: float | None
    # What a request that does not say how long its answer may be reserves for it, in tokens.
    unstated_output: int
    # What a cached prompt token counts against limits.
    cached_weight: float

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the bounds of a configuration."""
        server, limits = settings.server, settings.limits
        return cls(
            server.max_body_bytes,
            server.client_stall_s,
            server.sse_keepalive_s,
            limits.unstated_output_tokens,
            limits.cached_token_weight,
        )


@dataclass(slots=True)
class Relay:
    """The rooms that a request passes through. A reload replaces `bounds`, nothing else."""

    authenticator: Authenticator
    limiter: Limiter
    budgets: Budgets
    admission: Admission
    keeper: Keeper
    catalogue: Catalogue
    attempts: Attempts
    ledger: Ledger
    metrics: Metrics
    access: AccessLog
    bounds: RelayBounds

    async def serve(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever becomes of it. Raises nothing."""
        path = scope["path"]
        record = RequestRecord(request_id(scope["headers"]), endpoint.label, perf_counter())
        exchange = Exchange(scope, send, record, dialect_of(path), self.bounds.client_stall_s)
        serve = self._serve_model if endpoint.names_model else self._serve_stored
        try:
            if scope["method"] not in endpoint.methods:
                allowed = ", ".join(endpoint.methods)
                raise MethodNotAllowed(f"{path} takes {allowed}", allowed)  # noqa: TRY301
            principal = self.authenticator.recall(scope["headers"])
            if principal is None:
                principal = await self.authenticator.look_up(scope["headers"])
            record.principal = principal.id
            raw = await read_body(exchange, receive, self.bounds.body_bytes)
            with DisconnectWatch(receive, exchange):
                await serve(endpoint, principal, exchange, raw)
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
            elif isinstance(error, RateLimited):
                self.metrics.rate_limited(error.limit)
            record.fault = error.message
            await self._tell(error, exchange)
        except Exception:
            log.exception("request %s failed in a way nobody thought of", record.request_id)
            record.fault = "internal error"
            await self._tell(GatewayError("internal error; the request id leads to it"), exchange)
        finally:
            self._note(endpoint, record)

    async def _serve_model(
        self, endpoint: Endpoint, principal: Principal, exchange: Exchange, raw: bytes
    ) -> None:
        """Serve a request whose body names a model."""
        arrived = perf_counter()
        record = exchange.record
        body = parse(exchange.header(b"content-type"), raw)
        model = self.catalogue.find(body.model, principal.allows)
        record.model = model.name
        record.bytes_in = len(raw)
        plan = rewrite(record.endpoint, body.members, model.bounds) if body.members else NOTHING
        tokens = self._most_tokens(endpoint, body, plan, model)
        ask = Ask(principal.id, principal.limits, model.name, model.limits, tokens)
        quiet_s = self.bounds.keepalive_s
        awake = (
            KeepAlive(exchange, quiet_s) if quiet_s and is_stream(body.members) else nullcontext()
        )
        # Awake before hold and permit: a stream that waits for them is silent as well. The hold
        # comes first: it has a bound of its own, and what waits for a load takes no engine's room.
        with (
            await self._charge(exchange, principal, ask) as charge,
            awake,
            await self._hold(record, model) if model.on_demand else nullcontext(),
            await self._admit(record, principal, ask),
        ):
            if record.queued_s is not None:
                model = self.catalogue.current(model)  # its engines may be others by now
            ours = perf_counter() - arrived - (record.queued_s or 0.0)
            self.metrics.overhead(model.name, ours)
            await self._relay_model(exchange, body, model, plan, charge)

    def _most_tokens(
        self, endpoint: Endpoint, body: ParsedBody, plan: Rewrite, model: Model
    ) -> int:
        """Return what to reserve for a request."""
        if not endpoint.metered:
            return 0
        longest, unstated = model.max_model_len, self.bounds.unstated_output
        size = len(body.raw)
        return most_tokens(endpoint.label, body.members, plan.changes, size, longest, unstated)

    async def _charge(self, exchange: Exchange, principal: Principal, ask: Ask) -> Charge:
        """Return the charge for a request: leave it. Raises RateLimited and ServiceUnavailable."""
        decision = await self.limiter.decide(ask)
        exchange.standing = decision.headers
        decision.__enter__()  # raises the refusal
        daily, monthly = principal.daily_tokens, principal.monthly_tokens
        if daily is None and monthly is None:
            return Charge(decision, None, self.bounds.cached_weight)
        with ExitStack() as undo:
            undo.push(decision)
            budget = await self.budgets.reserve(principal.id, daily, monthly, ask.tokens)
            undo.pop_all()
        return Charge(decision, budget, self.bounds.cached_weight)

    async def _hold(self, record: RequestRecord, model: Model) -> Hold:
        """Return a hold on a model once it is loaded, and note how long that took.

        Raises EngineUnavailable and EngineOverloaded.
        """
        asked = perf_counter()
        try:
            hold = await self.keeper.hold(model.name)
        except (asyncio.CancelledError, EngineOverloaded, EngineUnavailable):
            record.queued_s = perf_counter() - asked
            raise
        record.queued_s = hold.waited_s
        return hold

    async def _admit(self, record: RequestRecord, principal: Principal, ask: Ask) -> Permit:
        """Return a permit when it is the request's turn, and note how long it had to wait.

        Raises EngineUnavailable and EngineOverloaded.
        """
        asked = perf_counter()
        held_s = record.queued_s
        try:
            permit = await self.admission.permit(
                ask.model, principal.id, principal.priority, principal.weight, ask.tokens
            )
        except (asyncio.CancelledError, EngineOverloaded):
            record.queued_s = (held_s or 0.0) + perf_counter() - asked
            raise
        if permit.waited_s is not None:
            record.queued_s = (held_s or 0.0) + permit.waited_s
        return permit

    async def _relay_model(
        self, exchange: Exchange, body: ParsedBody, model: Model, plan: Rewrite, charge: Charge
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
            if usage is not None and record.engine is not None:
                charge.settle(usage)
            if record.ttft_s is not None:
                self.metrics.first_token(model.name, record.ttft_s)

    async def _serve_stored(
        self, endpoint: Endpoint, principal: Principal, exchange: Exchange, raw: bytes
    ) -> None:
        """Serve a request for something that one of the engines keeps."""
        ask = Ask(principal.id, principal.limits, UNKNOWN_MODEL, NO_LIMITS, 0)
        with (
            await self._charge(exchange, principal, ask),
            await self.admission.permit(None, principal.id),
        ):
            request = _engine_request(exchange, raw)
            allowed = [model for model in self.catalogue.models if principal.allows(model.name)]
            if not allowed:
                raise RouteNotFound("there is no such response")
            lease = await self.attempts.first_that_knows(allowed, request)
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
        if record.engine is not None:
            ended = outcome(record)
            if endpoint.metered:
                self.metrics.usage(record.model, ended, record.usage)
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
