"""One request between its body and the last byte of its answer: limits, queue, engine, relay.

Every resource (the share of limits and budget, the hold on a model that is loaded on demand, the
permit, the lease with the connection to the engine) is a `with` statement here and released when
that is left: on success, error and disconnect alike.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack, nullcontext
from time import perf_counter
from typing import Any, TypeVar

from app.admission.admission import Permit
from app.auth.principal import Principal
from app.errors import (
    EngineFailed,
    EngineOverloaded,
    EngineTooSlow,
    EngineUnavailable,
    GatewayError,
    ModelNotFound,
    RateLimited,
    RouteNotFound,
)
from app.limits.terms import Ask
from app.relay.answer import Truncated, as_gateway_error, head_of, relay_plain
from app.relay.body import ParsedBody, parse
from app.relay.charge import Charge
from app.relay.clues import RequestClues
from app.relay.cost import most_tokens
from app.relay.exchange import Exchange
from app.relay.request import engine_request
from app.relay.rewrite import NOTHING, Rewrite, is_stream, rewrite
from app.relay.rooms import Endpoint, Rooms
from app.relay.stream import EventStream, KeepAlive
from app.residency.keeper import Hold
from app.routing.catalogue import Model
from app.routing.replica import Replica
from app.settings import NO_LIMITS
from app.telemetry.access import UNKNOWN_MODEL
from app.usage.meter import StreamMeter
from engines.base import EngineError, EngineRequest, EngineResponse

# What says that a model cannot serve a request, before anything of an answer has left. The last two
# are of a fallback that all keys together use too much, or that has gone since.
CANNOT_SERVE = (
    EngineUnavailable, EngineOverloaded, EngineFailed, EngineTooSlow, RateLimited, ModelNotFound,
)  # fmt: skip

WaitedT = TypeVar("WaitedT", Hold, Permit)


class Serving:
    """One request on its way through the rooms. Use it for one of its two methods, once."""

    __slots__ = ("_endpoint", "_exchange", "_principal", "_record", "_rooms")

    def __init__(
        self, rooms: Rooms, endpoint: Endpoint, principal: Principal, exchange: Exchange
    ) -> None:
        self._rooms = rooms
        self._endpoint = endpoint
        self._principal = principal
        self._exchange = exchange
        self._record = exchange.record

    async def by_model(self, raw: bytes) -> None:
        """Have the model that a body names serve, or a fallback of it. Raises GatewayError."""
        arrived = perf_counter()
        rooms, principal, exchange, record = (
            self._rooms, self._principal, self._exchange, self._record,
        )  # fmt: skip
        body = parse(exchange.header(b"content-type"), raw)
        asked = rooms.catalogue.find(body.model, principal.allows)
        record.model, record.asked = asked.name, body.model
        plan, tokens = self._plan(body, asked)
        ask = Ask(principal.id, principal.limits, asked.name, asked.limits, tokens)
        if record.trace is not None:
            record.trace.begin("limits")
        quiet_s = rooms.bounds.keepalive_s
        awake = (
            KeepAlive(exchange, quiet_s) if quiet_s and is_stream(body.members) else nullcontext()
        )
        fault: GatewayError | None = None
        # Awake before hold and permit: a stream that waits for them is silent as well.
        with await self._charge(ask) as charge, awake:
            for model in rooms.catalogue.in_turn(asked, principal.allows):
                try:
                    if fault is None:
                        await self._use(body, model, plan, ask, charge, arrived)
                    else:
                        rooms.metrics.fallback(asked.name, model.name)
                        await self._fall_back(body, model, charge)
                except CANNOT_SERVE as error:
                    if record.trace is not None:
                        record.trace.failed(asked.name, error.code)
                    if fault is None:
                        # A traceback would keep the body until the next garbage collection.
                        fault = error.with_traceback(None)
                    if rooms.admission.draining:
                        break  # no other is given a permit either
                else:
                    return
            record.model = asked.name  # none could serve, and it is its fault that is told
            assert fault is not None
            raise fault

    async def by_whoever_knows(self, raw: bytes) -> None:
        """Relay a request for something that one of the engines keeps. Raises GatewayError."""
        rooms, principal, exchange, record = (
            self._rooms, self._principal, self._exchange, self._record,
        )  # fmt: skip
        ask = Ask(principal.id, principal.limits, UNKNOWN_MODEL, NO_LIMITS, 0)
        if record.trace is not None:
            record.trace.begin("limits")
        with await self._charge(ask), await rooms.admission.permit(None, principal.id):
            if record.trace is not None:
                record.trace.ask(None)
            request = engine_request(exchange, raw)
            allowed = [model for model in rooms.catalogue.models if principal.allows(model.name)]
            if not allowed:
                raise RouteNotFound("there is no such response")
            lease = await rooms.attempts.first_that_knows(allowed, request, record)
            with lease as answer:
                if record.trace is not None:
                    record.trace.answered(answer.status)
                await self._relay(answer, StreamMeter(), UNKNOWN_MODEL)

    def _plan(self, body: ParsedBody, model: Model) -> tuple[Rewrite, int]:
        """Return what to change in a body for a model, and how many tokens to reserve there."""
        endpoint, members = self._endpoint, body.members
        plan = rewrite(endpoint.label, members, model.bounds) if members else NOTHING
        if not endpoint.metered:
            return plan, 0
        unstated = self._rooms.bounds.unstated_output
        size, longest = len(body.raw), model.max_model_len
        return plan, most_tokens(endpoint.label, members, plan.changes, size, longest, unstated)

    async def _charge(self, ask: Ask) -> Charge:
        """Return the charge for a request: leave it. Raises RateLimited and ServiceUnavailable."""
        rooms, principal = self._rooms, self._principal
        weight = rooms.bounds.cached_weight
        decision = await rooms.limiter.decide(ask)
        self._exchange.standing = decision.headers
        decision.__enter__()  # raises the refusal
        daily, monthly = principal.daily_tokens, principal.monthly_tokens
        if daily is None and monthly is None:
            return Charge(decision, None, weight)
        with ExitStack() as undo:
            undo.push(decision)
            budget = await rooms.budgets.reserve(principal.id, daily, monthly, ask.tokens)
            undo.pop_all()
        return Charge(decision, budget, weight)

    async def _fall_back(self, body: ParsedBody, model: Model, charge: Charge) -> None:
        """Have a model serve that was not asked for, within its own limits. Raises CANNOT_SERVE.

        What the request holds of the caller's limits and of the other model's stays as it is.
        """
        plan, tokens = self._plan(body, model)
        ask = Ask(self._principal.id, NO_LIMITS, model.name, model.limits, tokens)
        with await self._rooms.limiter.decide(ask) as share:
            charge.also(share)
            await self._use(body, model, plan, ask, charge)

    async def _use(
        self,
        body: ParsedBody,
        model: Model,
        plan: Rewrite,
        ask: Ask,
        charge: Charge,
        arrived: float | None = None,
    ) -> None:
        """Have a model serve a request when it is loaded and has room. Raises CANNOT_SERVE.

        `arrived` is when the request was here; None: another model has taken its time since.
        """
        rooms, record, who = self._rooms, self._record, self._principal
        # The hold comes first: it has a bound of its own, and what waits for a load takes no
        # engine's room.
        with (
            await self._waited("load_wait", rooms.keeper.hold(model.name))
            if model.on_demand
            else nullcontext(),
            await self._waited(
                "queue",
                rooms.admission.permit(ask.model, who.id, who.priority, who.weight, ask.tokens),
            ),
        ):
            if record.queued_s is not None:
                model = rooms.catalogue.current(model)  # its engines may be others by now
            if arrived is not None:
                ours = perf_counter() - arrived - (record.queued_s or 0.0)
                rooms.metrics.overhead(model.name, ours)
            await self._relay_model(body, model, plan, charge)

    async def _waited(self, step: str, asked: Coroutine[Any, Any, WaitedT]) -> WaitedT:
        """Return a hold or a permit when it is there, and note how long that took.

        Raises EngineUnavailable and EngineOverloaded.
        """
        record = self._record
        began = perf_counter()
        before_s = record.queued_s
        if record.trace is not None:
            record.trace.begin(step)
        try:
            got = await asked
        except (asyncio.CancelledError, EngineOverloaded, EngineUnavailable):
            record.queued_s = (before_s or 0.0) + perf_counter() - began
            raise
        if got.waited_s is not None:
            record.queued_s = (before_s or 0.0) + got.waited_s
        if record.trace is not None:
            record.trace.end(waited=got.waited_s is not None)
        return got

    async def _relay_model(
        self, body: ParsedBody, model: Model, plan: Rewrite, charge: Charge
    ) -> None:
        """Have one of a model's engines answer, and note what that took."""
        rooms, exchange, record = self._rooms, self._exchange, self._record

        def request_for(replica: Replica, fault: EngineError | None) -> EngineRequest:
            if record.trace is not None:
                record.trace.ask(replica.engine.name, fault)
            return engine_request(exchange, body.for_engine(replica.served_name, plan.changes))

        meter = StreamMeter(withhold=plan.withhold_usage, one_choice=plan.one_choice)
        left = False
        try:
            clues = RequestClues(exchange, body)
            lease = await rooms.attempts.first_answer(model, clues, request_for, record)
            with lease as answer:
                if record.trace is not None:
                    record.trace.answered(answer.status)
                meter.fingerprint = lease.replica.fingerprint
                await self._relay(answer, meter, model.name)
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
                rooms.metrics.first_token(model.name, record.ttft_s)

    async def _relay(self, answer: EngineResponse, meter: StreamMeter, model: str) -> None:
        """Carry an answer to the client. Raises GatewayError, or Truncated once its head left."""
        exchange = self._exchange
        head = head_of(answer)
        if not head.is_stream:
            meter.usage = await relay_plain(answer, exchange, head.headers)
            return
        gaps = self._rooms.metrics.gaps(model)
        try:
            await EventStream(answer, exchange, meter, gaps).run(head.headers)
        except EngineError as error:
            await exchange.fail(as_gateway_error(error))
            raise Truncated(str(error)) from None
