"""Serves one authenticated request: body, limits, budget, queue, replica.

Every resource is released on success, error and disconnect alike: limits, budget, body memory, the
hold on a model that is loaded on demand and the permit by `with`; the replica's place by `finally`;
the engine's response in `carry.py`.

A body of up to 64 KiB that is quick to parse is read first, so that one decision takes request,
slot and tokens: Redis may have to be asked. Any other request is counted and takes its slot before
its body is read or scanned.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from app.admission import Permit
from app.auth import Principal
from app.errors import (
    EngineFailed,
    EngineOverloaded,
    EngineTooSlow,
    EngineUnavailable,
    GatewayError,
)
from app.limits import Decision, LimitRequest
from app.relay.attempts import Attempts
from app.relay.billed_usage import usage_of
from app.relay.body import ParsedBody, is_quick, parse
from app.relay.body_memory import SMALL_BYTES
from app.relay.body_plan import Planned, elastic_tokens, plan_body
from app.relay.body_reader import (
    announces_little,
    check_body,
    check_size,
    read_scanned,
    read_small,
    scan_whole,
)
from app.relay.engine_request import engine_request
from app.relay.fallbacks import CANNOT_SERVE, MOST_ASKS, FallbackChain
from app.relay.forward import carry
from app.relay.grant import Delivery, Grant
from app.relay.request_context import RequestContext
from app.relay.reservation import Reservation
from app.relay.response import NotRouted
from app.relay.rewrite import (
    COMPLETIONS,
    RESPONSES,
    truth,
)
from app.relay.routing_hints import RequestHints
from app.relay.services import RelayServices
from app.relay.stored_responses import claim, keeper_of, relay_stored, stored_id, with_id
from app.relay.stream import KeepAlive
from app.relay.token_cost import Cost
from app.residency import ModelLease, StartWait, Step
from app.routing import Model, Replica
from app.settings import NO_LIMITS
from app.telemetry.request_record import UNKNOWN_MODEL
from app.usage.budgets import BudgetReservation
from engines.base import EngineError

WaitedT = TypeVar("WaitedT", ModelLease, Permit, StartWait)


class RequestHandler:
    """One request on its way through the services. Use it once."""

    __slots__ = (
        "_endpoint", "_exchange", "_output_bound", "_principal", "_request", "_services",
    )  # fmt: skip

    def __init__(
        self,
        services: RelayServices,
        principal: Principal,
        request: RequestContext,
    ) -> None:
        self._services = services
        self._principal = principal
        self._request = request
        self._endpoint = request.endpoint
        self._exchange = request.exchange
        # What a budget leaves each answer of a request that states no length of its own.
        self._output_bound: int | None = None

    async def run(self) -> None:
        """Serve the request. Raises GatewayError, Truncated, ClientStalled."""
        in_flight, key_id = self._services.in_flight, self._principal.id
        # Before anything is waited for: a key that is cut off from now on ends this request.
        in_flight.add(key_id, self._exchange)
        try:
            if not self._endpoint.names_model:
                self._request.trace.begin("limits")
                with await self._enter():
                    await relay_stored(self._services, self._principal, self._request)
                return
            raw = self._exchange.take_body()
            if raw is None and announces_little(self._exchange, self._services.bounds.body_bytes):
                raw = await read_small(self._exchange)
            if raw is not None and len(raw) <= SMALL_BYTES and is_quick(raw):
                await self._by_model(await self._plan_at_once(raw), entered=False)
            else:
                with ExitStack() as held:
                    planned, entered = await self._take_in(raw, held)
                    await self._by_model(planned, entered=entered)
        finally:
            in_flight.discard(key_id, self._exchange)

    # The request

    async def _plan_at_once(self, raw: bytes) -> Planned:
        """Return the plan for a body that is quick to read. Raises GatewayError."""
        self._request.bytes_in = len(raw)
        try:
            check_body(raw, self._services.bounds.body_bytes)
            return self._plan_asked(parse(self._exchange.header(b"content-type"), raw))
        except GatewayError:
            with await self._enter():
                raise  # refused, and counted all the same

    async def _take_in(self, raw: bytes | None, held: ExitStack) -> tuple[Planned, bool]:
        """Read the request and plan it; return whether its request and slot are taken already.

        `raw` is its body, if it is here. What it takes on the way is pushed on `held`. Raises
        GatewayError.
        """
        services, exchange = self._services, self._exchange
        limit = services.bounds.body_bytes
        memory = services.body_memory.open(self._principal.id, exchange.peer)
        if raw is not None and len(raw) <= limit and is_quick(raw):
            try:
                held.enter_context(memory).take(len(raw))
            except GatewayError:
                with await self._enter():
                    raise
            return await self._plan_at_once(raw), False
        held.enter_context(await self._enter())
        held.enter_context(memory)
        if raw is None:
            check_size(exchange, limit)
            body = await read_scanned(self._request, limit, memory, services.scan_turns)
        else:
            self._request.bytes_in = len(raw)
            check_body(raw, limit)
            body = await scan_whole(exchange, raw, memory, services.scan_turns)
        return self._plan_asked(body), True

    def _plan_asked(self, body: ParsedBody) -> Planned:
        """Return the plan for the model that a body asks for. Raises GatewayError."""
        model = self._services.catalogue.find(body.model, self._principal.allows)
        request = self._request
        request.model, request.requested_model = model.name, body.model
        if not model.serves(self._endpoint.label):
            raise model.not_served(self._endpoint.label, body.model)
        return self._plan(body, model)

    def _plan(self, body: ParsedBody, model: Model) -> Planned:
        """Return what to change in a body for a model, and what to reserve there.

        Raises BadRequest for what this model or key does not take.
        """
        bound = self._output_bound
        return plan_body(self._services, self._endpoint, self._principal, body, model, bound)

    # Limits

    async def _enter(self) -> Decision:
        """Count the request and take its slot; enter what is returned.

        Raises ServiceUnavailable; entering raises RateLimited.
        """
        who = self._principal
        ask = LimitRequest(who.id, who.limits, UNKNOWN_MODEL, NO_LIMITS, 0, owner=who.team)
        return await self._decide(ask)

    async def _decide(self, ask: LimitRequest) -> Decision:
        limiter = self._services.limiter
        decision = limiter.decide_at_once(ask) or await limiter.decide(ask)
        self._exchange.rate_lines = decision.header_lines
        return decision

    async def _reserve(self, planned: Planned) -> BudgetReservation:
        """Return what is held of the budgets of key and owner.

        Raises QuotaUsedUp and ServiceUnavailable.
        """
        principal, cost = self._principal, planned.cost
        elastic = elastic_tokens(self._endpoint.label, planned)
        budget = await self._services.budgets.reserve(
            principal.id, principal.daily_tokens, principal.monthly_tokens, cost.tokens, elastic,
            principal.team,
        )  # fmt: skip
        if elastic is not None:
            self._output_bound = (budget.tokens - cost.prompt) // cost.answers
        return budget

    # By model

    async def _by_model(self, planned: Planned, *, entered: bool) -> None:
        """Have the model that was asked for serve, or a fallback of it. Raises GatewayError."""
        arrived = perf_counter()
        services, principal, asked = self._services, self._principal, planned.model
        tokens = self._reserved(planned.cost)
        ask = LimitRequest(
            principal.id, principal.limits, asked.name, asked.limits, tokens, True, entered,
            principal.team,
        )  # fmt: skip
        self._request.trace.begin("limits")
        limiter, weight = services.limiter, services.bounds.cached_weight
        decision = limiter.decide_at_once(ask) or await limiter.decide(ask)
        self._exchange.rate_lines = decision.header_lines
        with decision:
            if not principal.has_budget or not self._endpoint.metered:
                charge = Reservation(decision, None, weight)
                await self._in_turn(planned, ask, charge, arrived)
                return
            with await self._reserve(planned) as budget:
                if self._output_bound is not None:
                    planned = self._plan(planned.body, asked)
                charge = Reservation(decision, budget, weight)
                await self._in_turn(planned, ask, charge, arrived)

    async def _in_turn(
        self, planned: Planned, ask: LimitRequest, charge: Reservation, arrived: float
    ) -> None:
        """Have the model that was asked for serve, then its fallbacks. Raises GatewayError."""
        quiet_s = self._services.bounds.keepalive_s
        awake: KeepAlive | None = None
        only: str | None = None
        standby: FallbackChain | None = None
        if quiet_s and truth(planned.rewrite.value(planned.body, "stream")):
            # Before hold and permit: a stream that waits for them is silent as well.
            awake = KeepAlive(self._exchange, quiet_s)
        try:
            if self._endpoint.label == RESPONSES:
                only = await self._keeper_of_previous(planned)
            if planned.model.on_demand:
                standby = self._standby(planned.model, only)
                await self._load_and_use(planned, ask, charge, only, arrived, standby)
            else:
                await self._use(planned, ask, charge, only, arrived)
        except CANNOT_SERVE as error:
            standby = standby or self._standby(planned.model, only)
            # A traceback would keep the body until the next garbage collection.
            await self._use_fallback(planned, ask, charge, standby, error.with_traceback(None))
        finally:
            if awake is not None:
                awake.stop()

    async def _use_fallback(
        self,
        planned: Planned,
        ask: LimitRequest,
        charge: Reservation,
        standby: FallbackChain | None,
        fault: GatewayError,
    ) -> None:
        """Have a fallback of the model that was asked for serve, or that model once it is up.

        The request waits for its model only where nothing of it has reached an engine. Raises
        GatewayError.
        """
        services, request, asked = self._services, self._request, planned.model
        request.trace.failed(asked.name, fault.code)
        waits, asks_left = isinstance(fault, EngineUnavailable), MOST_ASKS
        yielded = False
        # While the gateway drains, no model gives a permit.
        while standby is not None and standby.any_left and not services.admission.draining:
            step = standby.step() if waits else Step.GIVE_UP
            model: Model | None = None
            try:
                if step is Step.WAIT and not asked.on_demand:
                    await self._waited("load_wait", standby.wait())
                    continue
                if step is Step.WAIT or step is Step.ASK:
                    asks_left -= 1
                    waits = asks_left > 0
                    if asked.on_demand:
                        await self._load_and_use(planned, ask, charge, None, None, standby)
                    else:
                        await self._use(planned, ask, charge, None, None)
                    return
                waits = yielded = waits and step is not Step.GIVE_UP
                model = standby.take(0 if step is Step.GIVE_UP else step)
                if model is None:
                    continue
                services.metrics.fallbacks.add((asked.name, model.name))
                await self._fall_back(planned.body, model, charge)
                return
            except CANNOT_SERVE as error:
                request.trace.failed(asked.name, error.code)
                if model is None:  # it is the model's that was asked for
                    fault = error.with_traceback(None)
                    waits = waits and isinstance(error, EngineUnavailable)
                elif isinstance(error, (EngineFailed, EngineTooSlow)):
                    waits = False  # the request may be the reason
        request.model = asked.name  # none could serve, and it is its fault that is told
        if not (waits and yielded and asked.on_demand) or services.admission.draining:
            raise fault
        # It was left for fallbacks that could not serve: it is waited for as if it had none.
        await self._load_and_use(planned, ask, charge, None, None, standby)

    def _standby(self, asked: Model, only: str | None) -> FallbackChain | None:
        """Return what else may serve a request; None: it has no fallbacks."""
        if only is not None or not asked.fallbacks:
            return None
        return FallbackChain(self._services, asked, self._principal.allows, self._endpoint.label)

    def _reserved(self, cost: Cost) -> int:
        """Return the tokens to reserve of limits; what computes nothing takes a part of them."""
        if self._endpoint.metered:
            return cost.tokens
        return max(1, round(cost.prompt * self._services.bounds.tokenize_weight))

    async def _fall_back(self, body: ParsedBody, model: Model, charge: Reservation) -> None:
        """Have a model serve that was not asked for, within its own limits. Raises CANNOT_SERVE.

        What the request holds of the caller's limits and of the other model's stays as it is.
        """
        planned = self._plan(body, model)
        tokens = self._reserved(planned.cost)
        ask = LimitRequest(self._principal.id, NO_LIMITS, model.name, model.limits, tokens)
        with await self._services.limiter.decide(ask) as share:
            charge.also(share)
            if model.on_demand:
                await self._load_and_use(planned, ask, charge, None, None, None)
            else:
                await self._use(planned, ask, charge, None, None)

    async def _load_and_use(
        self,
        planned: Planned,
        ask: LimitRequest,
        charge: Reservation,
        only: str | None,
        arrived: float | None,
        standby: FallbackChain | None,
    ) -> None:
        """Have a model serve a request when it is loaded and has room; see `_use`.

        A load is left to go on alone when a fallback of `standby` is up before it.
        """
        # The hold comes first: it has a bound of its own, and what waits for a load takes no
        # engine's room.
        hold = partial(self._services.keeper.lease, planned.model.name)
        if standby is not None:
            hold = partial(hold, yields=standby.yields, bound_s=max(standby.left_s, 0.0))
        with await self._waited("load_wait", hold()):
            await self._use(planned, ask, charge, only, arrived)

    async def _use(
        self,
        planned: Planned,
        ask: LimitRequest,
        charge: Reservation,
        only: str | None,
        arrived: float | None,
    ) -> None:
        """Have a model serve a request when it has room. Raises CANNOT_SERVE.

        `only` names the one engine that can; `arrived` is when the request was here; None: another
        model has taken its time since.
        """
        services, request, who, model = (
            self._services,
            self._request,
            self._principal,
            planned.model,
        )
        permit = services.admission.permit_at_once(ask.model)
        if permit is None:
            waiting = services.admission.permit(
                ask.model, who.id, who.priority, who.weight, ask.tokens
            )
            permit = await self._waited("queue", waiting)
        with permit:
            # Limits, budget and queue may have been waited for: its engines may be others by now.
            model = services.catalogue.current(model)
            if arrived is not None:
                ours = perf_counter() - arrived - (request.queued_s or 0.0)
                services.metrics.overhead.observe((model.name,), ours)
            await self._serve_from(planned, model, charge, only)

    async def _waited(self, step: str, asked: Coroutine[Any, Any, WaitedT]) -> WaitedT:
        """Return a hold or a permit when it is there, and note how long that took.

        Raises EngineUnavailable and EngineOverloaded.
        """
        request = self._request
        began = perf_counter()
        before_s = request.queued_s
        request.trace.begin(step)
        try:
            got = await asked
        except (asyncio.CancelledError, EngineOverloaded, EngineUnavailable):
            request.queued_s = (before_s or 0.0) + perf_counter() - began
            raise
        if got.waited_s is not None:
            request.queued_s = (before_s or 0.0) + got.waited_s
        request.trace.end(waited=got.waited_s is not None)
        return got

    async def _serve_from(
        self, planned: Planned, model: Model, charge: Reservation, only: str | None
    ) -> None:
        """Have one of a model's engines answer, and charge what that took."""
        services, exchange, request = self._services, self._exchange, self._request
        kept_id = None
        if self._endpoint.label == RESPONSES:
            kept_id = stored_id(planned.rewrite, planned.body)
        engine_id = services.engine_ids.next(exchange.request_id)
        clues = RequestHints(
            exchange,
            self._principal.id,
            planned.body,
            planned.rewrite.changes.get("cache_salt", b""),
        )
        attempts = Attempts(model, clues, only, request, services.metrics)
        gaps = services.metrics.inter_token_latency.buckets((model.name,))
        delivery = Delivery()
        left = False
        try:
            while True:
                replica = attempts.next()
                replica.in_flight += 1
                try:
                    request.trace.begin_attempt(replica.engine.name, attempts.fault)
                    grant = self._grant(planned, replica, engine_id, kept_id, model.header_line)
                    on_head = None
                    if kept_id is not None:
                        on_head = partial(self._claim, kept_id, model, replica)
                    await carry(replica.engine, grant, request, gaps, delivery, on_head)
                except EngineError as error:
                    attempts.failed(replica, error)
                except NotRouted:
                    label = self._endpoint.label
                    raise model.not_served(label, request.requested_model) from None
                else:
                    replica.fingerprint = delivery.fingerprint or replica.fingerprint
                    return
                finally:
                    replica.in_flight -= 1
        except asyncio.CancelledError:
            left = True
            raise
        finally:
            if request.engine is not None:
                self._settle(planned, delivery, charge, left=left)
            if request.ttft_s is not None:
                services.metrics.time_to_first_token.observe((model.name,), request.ttft_s)

    def _grant(
        self,
        planned: Planned,
        replica: Replica,
        engine_id: str,
        kept_id: str | None,
        model_line: bytes,
    ) -> Grant:
        """Return what may be carried to a replica."""
        plan, body = planned.rewrite, planned.body
        changes = plan.changes if kept_id is None else with_id(plan.changes, kept_id)
        raw = body.for_engine(replica.served_name, changes, plan.dropped)
        priority = self._principal.priority if replica.by_priority else None
        return Grant(
            engine_request(self._request, raw, engine_id, priority),
            planned.cost.prompt,
            plan.withhold_usage,
            plan.one_choice,
            bool(plan.value(body, "logprobs")),
            self._endpoint.label != COMPLETIONS,
            replica.fingerprint,
            plan.withhold_metadata,
            model_line,
        )

    async def _claim(self, response_id: str, model: Model, replica: Replica, status: int) -> None:
        """Note whose a stored response is. Raises ServiceUnavailable."""
        if status < 300:
            # Before a byte of the response is sent, so before the client knows the id.
            await claim(self._services.stored, response_id, self._principal, model, replica)

    def _settle(
        self, planned: Planned, delivery: Delivery, charge: Reservation, *, left: bool
    ) -> None:
        """Charge what a request took that reached an engine, however it ended."""
        if not self._endpoint.metered:
            charge.keep()
            return
        plan, body = planned.rewrite, planned.body
        usage = usage_of(
            planned.cost,
            delivery,
            left=left,
            streamed=truth(plan.value(body, "stream")) is True,
            runs_on=truth(plan.value(body, "background")) is True,
        )
        self._request.usage = usage
        if usage is not None:
            charge.settle(usage)

    async def _keeper_of_previous(self, planned: Planned) -> str | None:
        """Return the engine that keeps the response which a request goes on from; None: no such.

        Raises RouteNotFound where the caller has no such response.
        """
        previous = planned.rewrite.value(planned.body, "previous_response_id")
        if previous in (b"", b"null"):
            return None
        model = self._services.catalogue.current(planned.model)
        return await keeper_of(self._services.stored, previous, model, self._principal)
