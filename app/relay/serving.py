"""One request between its head and the last byte of its answer: limits, body, queue, engine, relay.

Every resource (the share of limits and budget, the bytes of a large body, the hold on a model that
is loaded on demand, the permit, the lease with the connection to the engine) is a `with` statement
here and released when that is left: on success, error and disconnect alike.

A request is counted and takes its slot before its body is read. Where the body is small enough for
the connection's own buffer, and quick to read, that is one step with all the other limits, since
Redis may have to be asked.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from starlette.types import Receive

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
    RequestTooLarge,
)
from app.limits.limiter import Decision
from app.limits.terms import Ask
from app.relay.answer import Truncated, as_gateway_error, head_of, relay_plain
from app.relay.body import ParsedBody, check_media, is_quick, parse
from app.relay.body_memory import SMALL_BYTES
from app.relay.charge import Charge
from app.relay.charged_usage import Course, usage_of
from app.relay.clues import RequestClues
from app.relay.cost import Cost, check_inputs, check_sequences, cost_of
from app.relay.disconnect import DisconnectWatch
from app.relay.exchange import Exchange
from app.relay.intake import announces_little, check_size, read_scanned, read_small, scan_whole
from app.relay.request import engine_request
from app.relay.rewrite import (
    COMPLETIONS,
    MESSAGES,
    OUTPUT_FIELDS,
    RESPONSES,
    Rewrite,
    bounded_output,
    rewrite,
    states_output,
    truth,
)
from app.relay.rooms import Endpoint, Rooms
from app.relay.stored import checked_storage, claim, keeper_of, kept_by, stored_id, with_id
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


@dataclass(frozen=True, slots=True)
class Planned:
    """What is to be done about a body at one model."""

    body: ParsedBody
    model: Model
    rewrite: Rewrite
    cost: Cost


class Serving:
    """One request on its way through the rooms. Use it once."""

    __slots__ = (
        "_answered", "_endpoint", "_exchange", "_output_bound", "_principal", "_receive", "_record",
        "_rooms",
    )  # fmt: skip

    def __init__(
        self,
        rooms: Rooms,
        endpoint: Endpoint,
        principal: Principal,
        exchange: Exchange,
        receive: Receive,
    ) -> None:
        self._rooms = rooms
        self._endpoint = endpoint
        self._principal = principal
        self._exchange = exchange
        self._receive = receive
        self._record = exchange.record
        # What a budget leaves each answer of a request that states no length of its own.
        self._output_bound: int | None = None
        # The status of the engine's answer; a client may have got 200 before, with a comment.
        self._answered: int | None = None

    async def run(self) -> None:
        """Serve the request. Raises GatewayError, ClientDisconnected, Truncated, ClientStalled."""
        watch = DisconnectWatch(self._receive, self._exchange)
        in_flight, key_id = self._rooms.in_flight, self._principal.id
        # Before anything is waited for: a key that is cut off from now on ends this request.
        in_flight.add(key_id, watch)
        try:
            if not self._endpoint.names_model:
                with watch:
                    await self._by_id()
                return
            with ExitStack() as held:
                planned, entered = await self._take_in(held)
                arrived = perf_counter()
                with watch:
                    await self._by_model(planned, arrived, entered=entered)
        finally:
            in_flight.discard(key_id, watch)

    # The request

    async def _take_in(self, held: ExitStack) -> tuple[Planned, bool]:
        """Read the request and plan it; return whether its request and slot are taken already.

        What it takes on the way is pushed on `held`. Raises GatewayError and ClientDisconnected.
        """
        rooms, exchange, record = self._rooms, self._exchange, self._record
        limit = rooms.bounds.body_bytes
        raw = exchange.take_body()
        if raw is None and announces_little(exchange, limit):
            raw = await read_small(self._receive)
        if raw is not None and len(raw) <= limit and is_quick(raw):
            record.bytes_in = len(raw)
            try:
                if len(raw) > SMALL_BYTES:
                    memory = rooms.body_memory.open(self._principal.id, exchange.peer)
                    held.enter_context(memory).take(len(raw))
                return self._plan_asked(parse(exchange.header(b"content-type"), raw)), False
            except GatewayError:
                with await self._enter():
                    raise  # refused, and counted all the same
        held.enter_context(await self._enter())
        memory = held.enter_context(rooms.body_memory.open(self._principal.id, exchange.peer))
        if raw is None:
            check_size(exchange, limit)
            body = await read_scanned(exchange, self._receive, limit, memory, rooms.scan_turns)
        else:
            record.bytes_in = len(raw)
            if len(raw) > limit:
                raise RequestTooLarge(f"the request body is over the limit of {limit} bytes")
            body = await scan_whole(exchange, raw, memory, rooms.scan_turns)
        return self._plan_asked(body), True

    def _plan_asked(self, body: ParsedBody) -> Planned:
        """Return the plan for the model that a body asks for. Raises GatewayError."""
        model = self._rooms.catalogue.find(body.model, self._principal.allows)
        self._record.model, self._record.asked = model.name, body.model
        return self._plan(body, model)

    def _plan(self, body: ParsedBody, model: Model) -> Planned:
        """Return what to change in a body for a model, and what to reserve there.

        Raises BadRequest for what this model or key does not take.
        """
        rooms, endpoint = self._rooms, self._endpoint
        rules = rooms.rules.of(model, self._principal)
        salt = rooms.salts.salt(model.isolation, self._principal)
        plan = rewrite(endpoint.label, body, model.bounds, rules, salt)
        if endpoint.label == RESPONSES:
            plan = checked_storage(plan, body, stores=model.stores_responses)
        check_media(
            body,
            model.media_domains,
            uuids=model.isolation == "none",
            anthropic=endpoint.label.startswith(MESSAGES),
        )
        unstated = rooms.bounds.unstated_output
        cost = cost_of(endpoint.label, body, plan, model.max_model_len, unstated)
        check_sequences(cost.answers, model.bounds.sequences)
        if endpoint.label not in OUTPUT_FIELDS:
            check_inputs(body, model.bounds.inputs)
        if self._output_bound is not None:
            plan = self._bounded(plan, body)
        return Planned(body, model, plan, cost)

    def _bounded(self, plan: Rewrite, body: ParsedBody) -> Rewrite:
        """Return a plan that keeps each answer within what a budget leaves it."""
        assert self._output_bound is not None
        label = self._endpoint.label
        return plan.changed(bounded_output(label, body.members, plan.changes, self._output_bound))

    # Limits

    async def _enter(self) -> Decision:
        """Count the request and take its slot; enter what is returned.

        Raises ServiceUnavailable; entering raises RateLimited.
        """
        who = self._principal
        ask = Ask(who.id, who.limits, UNKNOWN_MODEL, NO_LIMITS, 0)
        return await self._decide(ask)

    async def _decide(self, ask: Ask) -> Decision:
        decision = await self._rooms.limiter.decide(ask)
        self._exchange.standing = decision.headers
        return decision

    async def _charge(self, ask: Ask, planned: Planned) -> Charge:
        """Return the charge for a request: leave it. Raises RateLimited and ServiceUnavailable."""
        rooms, principal = self._rooms, self._principal
        weight = rooms.bounds.cached_weight
        decision = await self._decide(ask)
        decision.__enter__()  # raises the refusal
        daily, monthly = principal.daily_tokens, principal.monthly_tokens
        if (daily is None and monthly is None) or not self._endpoint.metered:
            return Charge(decision, None, weight)
        with ExitStack() as undo:
            undo.push(decision)
            cost = planned.cost
            elastic = self._elastic(planned)
            budget = await rooms.budgets.reserve(principal.id, daily, monthly, cost.tokens, elastic)
            undo.pop_all()
        if elastic is not None:
            self._output_bound = (budget.tokens - cost.prompt) // cost.answers
        return Charge(decision, budget, weight)

    def _elastic(self, planned: Planned) -> tuple[int, int] | None:
        """Return the least and the most a request may take that does not say; None: it does."""
        body, cost, label = planned.body, planned.cost, self._endpoint.label
        if label not in OUTPUT_FIELDS or states_output(
            label, body.members, planned.rewrite.changes
        ):
            return None
        return cost.prompt + cost.answers, cost.prompt + cost.plausible_output

    # By model

    async def _by_model(self, planned: Planned, arrived: float, *, entered: bool) -> None:
        """Have the model that was asked for serve, or a fallback of it. Raises GatewayError."""
        rooms, principal, exchange, record = (
            self._rooms, self._principal, self._exchange, self._record,
        )  # fmt: skip
        asked, body = planned.model, planned.body
        tokens = self._reserved(planned.cost)
        ask = Ask(
            principal.id, principal.limits, asked.name, asked.limits, tokens, True, entered
        )  # fmt: skip
        if record.trace is not None:
            record.trace.begin("limits")
        quiet_s = rooms.bounds.keepalive_s
        awake = (
            KeepAlive(exchange, quiet_s)
            if quiet_s and truth(planned.rewrite.value(body, "stream"))
            else nullcontext()
        )
        fault: GatewayError | None = None
        # Awake before hold and permit: a stream that waits for them is silent as well.
        with await self._charge(ask, planned) as charge, awake:
            if self._output_bound is not None:
                planned = self._plan(body, asked)
            only = await self._keeper_of_previous(planned)
            in_turn = rooms.catalogue.in_turn(asked, principal.allows)
            for model in in_turn if only is None else (asked,):
                try:
                    if fault is None:
                        await self._use(planned, ask, charge, only, arrived)
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

    def _reserved(self, cost: Cost) -> int:
        """Return the tokens to reserve of limits; what computes nothing takes a part of them."""
        if self._endpoint.metered:
            return cost.tokens
        return max(1, round(cost.prompt * self._rooms.bounds.tokenize_weight))

    async def _fall_back(self, body: ParsedBody, model: Model, charge: Charge) -> None:
        """Have a model serve that was not asked for, within its own limits. Raises CANNOT_SERVE.

        What the request holds of the caller's limits and of the other model's stays as it is.
        """
        planned = self._plan(body, model)
        tokens = self._reserved(planned.cost)
        ask = Ask(self._principal.id, NO_LIMITS, model.name, model.limits, tokens)
        with await self._rooms.limiter.decide(ask) as share:
            charge.also(share)
            await self._use(planned, ask, charge, None)

    async def _use(
        self,
        planned: Planned,
        ask: Ask,
        charge: Charge,
        only: str | None,
        arrived: float | None = None,
    ) -> None:
        """Have a model serve a request when it is loaded and has room. Raises CANNOT_SERVE.

        `only` names the one engine that can; `arrived` is when the request was here; None: another
        model has taken its time since.
        """
        rooms, record, who, model = self._rooms, self._record, self._principal, planned.model
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
            await self._relay_model(planned, model, charge, only)

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
        self, planned: Planned, model: Model, charge: Charge, only: str | None
    ) -> None:
        """Have one of a model's engines answer, and note what that took."""
        rooms, exchange, record, who = (
            self._rooms, self._exchange, self._record, self._principal,
        )  # fmt: skip
        body, plan = planned.body, planned.rewrite
        engine_id = rooms.engine_ids.next(record.request_id)
        kept_id = stored_id(plan, body) if self._endpoint.label == RESPONSES else None
        changes = plan.changes if kept_id is None else with_id(plan.changes, kept_id)

        def request_for(replica: Replica, fault: EngineError | None) -> EngineRequest:
            if record.trace is not None:
                record.trace.ask(replica.engine.name, fault)
            raw = body.for_engine(replica.served_name, changes, plan.dropped)
            priority = who.priority if replica.by_priority else None
            return engine_request(exchange, raw, engine_id, priority)

        meter = StreamMeter(
            withhold=plan.withhold_usage,
            one_choice=plan.one_choice,
            wide=bool(plan.value(body, "logprobs")),
            opened=self._endpoint.label != COMPLETIONS,
        )
        left = False
        self._answered = None
        try:
            clues = RequestClues(exchange, body, plan.changes.get("cache_salt", b""))
            lease = await rooms.attempts.first_answer(model, clues, request_for, record, only)
            with lease as answer:
                self._answered = answer.status
                if record.trace is not None:
                    record.trace.answered(answer.status)
                if kept_id is not None and answer.status < 300:
                    # Before a byte of the answer is out, so before the client knows the id.
                    await claim(rooms.stored, kept_id, who, model, lease.replica)
                meter.fingerprint = lease.replica.fingerprint
                await self._relay(answer, meter, model.name, bare=plan.withhold_metadata)
                lease.replica.fingerprint = meter.fingerprint
        except asyncio.CancelledError:
            left = True
            raise
        finally:
            if record.engine is not None:
                self._settle(planned, meter, charge, left=left)
            if record.ttft_s is not None:
                rooms.metrics.first_token(model.name, record.ttft_s)

    def _settle(self, planned: Planned, meter: StreamMeter, charge: Charge, *, left: bool) -> None:
        """Charge what a request took that reached an engine, however it ended."""
        if not self._endpoint.metered:
            charge.keep()
            return
        exchange, body, plan = self._exchange, planned.body, planned.rewrite
        usage = usage_of(
            planned.cost,
            meter,
            Course(
                answered=self._answered,
                started=exchange.started,
                complete=exchange.complete,
                left=left,
                bytes_out=self._record.bytes_out,
                streamed=truth(plan.value(body, "stream")) is True,
                runs_on=truth(plan.value(body, "background")) is True,
            ),
        )
        self._record.usage = usage
        if usage is not None:
            charge.settle(usage)

    async def _relay(
        self, answer: EngineResponse, meter: StreamMeter, model: str, *, bare: bool = False
    ) -> None:
        """Carry an answer to the client. Raises GatewayError, or Truncated once its head left.

        `bare`: the client asked for no metadata beside the bytes.
        """
        exchange = self._exchange
        head = head_of(answer, bare=bare)
        if not head.is_stream:
            meter.usage = head.usage
            meter.usage = await relay_plain(answer, exchange, head.headers) or head.usage
            return
        gaps = self._rooms.metrics.gaps(model)
        try:
            await EventStream(answer, exchange, meter, gaps).run(head.headers)
        except EngineError as error:
            await exchange.fail(as_gateway_error(error))
            raise Truncated(str(error)) from None

    # By id

    async def _by_id(self) -> None:
        """Relay a request for a stored response to the engine that keeps it. Raises GatewayError.

        Nothing of its body goes there: what there is to say stands in its path.
        """
        rooms, principal, record = self._rooms, self._principal, self._record
        if record.trace is not None:
            record.trace.begin("limits")
        with await self._enter(), await rooms.admission.permit(None, principal.id):
            model, replica = await kept_by(rooms, principal, self._exchange.scope["path"])
            record.model = model.name
            if record.trace is not None:
                record.trace.ask(replica.engine.name, None)
            engine_id = rooms.engine_ids.next(record.request_id)
            request = engine_request(self._exchange, b"", engine_id)
            with await rooms.attempts.answer_of(replica, request, record) as answer:
                if record.trace is not None:
                    record.trace.answered(answer.status)
                await self._relay(answer, StreamMeter(), model.name)

    async def _keeper_of_previous(self, planned: Planned) -> str | None:
        """Return the engine that keeps the response which a request goes on from; None: no such.

        Raises RouteNotFound where the caller has no such response.
        """
        if self._endpoint.label != RESPONSES:
            return None
        previous = planned.rewrite.value(planned.body, "previous_response_id")
        if previous in (b"", b"null"):
            return None
        return await keeper_of(self._rooms.stored, previous, planned.model, self._principal)
