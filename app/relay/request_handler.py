"""Handles one authenticated request: its body, its limits, its budget, then a model.

A body of up to 16 KiB that is quick to parse is read first, so that the limiter decides once on
request, slot and tokens: it may have to ask Redis. Any other request is charged, with its slot,
before its body is parsed.
"""

import asyncio
from collections.abc import Coroutine
from time import perf_counter
from typing import Any
from urllib.parse import parse_qs

from app.asgi import ClientExchange
from app.errors import BadRequest, GatewayError, MissingModel
from app.limits import LimitDecision
from app.relay.body_reader import check_size, read_and_scan, read_if_small
from app.relay.fallback_chain import CANNOT_SERVE, FallbackChain
from app.relay.fallbacks import Fallback
from app.relay.model_request import ModelRequest, plan_request
from app.relay.request_context import RequestContext
from app.relay.routing_hints import RequestHints
from app.relay.services import RelayServices
from app.relay.stored_responses import find_previous_engine, relay_stored_response
from app.relay.stream import send_comments
from app.request_body import (
    RESPONSES,
    SMALL_BYTES,
    STREAMED,
    BodyPlan,
    ParsedBody,
    is_form,
    is_json,
    is_quick,
    parse,
    plan_body,
    reserved_tokens,
)
from app.routing import Model
from app.usage import BudgetReservation

# The moment by which a client wants its request to be at an engine, in milliseconds from now.
DEADLINE_HEADER = b"x-request-deadline-ms"
MAX_DEADLINE_MS = 24 * 60 * 60 * 1000


def handle_request(services: RelayServices, request: RequestContext) -> Coroutine[Any, Any, None]:
    """Return what handles a request to its end, to be awaited at once.

    Awaiting raises GatewayError, Truncated and ClientStalled.
    """
    if request.endpoint.names_model:
        exchange = request.exchange
        raw = b"" if exchange.method == "GET" else exchange.take_body()
        is_coded = exchange.by_name.get(b"content-encoding")
        if raw is not None and not is_coded and len(raw) <= SMALL_BYTES and is_quick(raw):
            return _handle_quick(services, request, raw)
        return _handle_large(services, request, raw)
    return _handle_stored(services, request)


def _handle_quick(
    services: RelayServices, request: RequestContext, raw: bytes
) -> Coroutine[Any, Any, None]:
    """Return what handles a request whose body is here and quick to parse."""
    try:
        request.bytes_in = size = len(raw)
        check_size(size, services.bounds.body_bytes)
        if request.exchange.method == "GET":
            body = ParsedBody(_model_in_query(services, request), b"", {})
        else:
            body = parse(request.exchange.by_name.get(b"content-type", b""), raw)
        plan = _plan_for_model(services, request, body)
    except GatewayError as error:
        return _refuse_counted(services, request, error)
    return _serve(services, request, plan, precharged=False)


async def _refuse_counted(
    services: RelayServices, request: RequestContext, error: GatewayError
) -> None:
    """Raise an error: a request that is refused counts all the same."""
    with await _count_request(services, request):
        try:
            raise error
        finally:
            del error  # it refers to this frame


async def _handle_large(
    services: RelayServices, request: RequestContext, raw: bytes | None
) -> None:
    """Handle a request whose body is large, or still to arrive; `raw` is what is here.

    The request and its slot are charged before the body is read; slot and memory are held.
    """
    request.timeline.note_authenticated()
    if raw is None:
        raw = await read_if_small(request.exchange, services.bounds.body_bytes)
        if raw is not None and len(raw) <= SMALL_BYTES and _is_quick(request.exchange, raw):
            await _handle_quick(services, request, raw)
            return
    exchange, principal, limit = request.exchange, request.principal, services.bounds.body_bytes
    memory = services.body_memory.open(principal.id, principal.owner_name, exchange.peer)
    with await _count_request(services, request), memory:
        if raw is not None and _is_quick(exchange, raw):
            request.bytes_in = len(raw)
            check_size(len(raw), limit)
            memory.take(len(raw))
            body = parse(exchange.header(b"content-type"), raw)
        else:
            body = await read_and_scan(request, raw, limit, memory, services.scan_turns)
        plan = _plan_for_model(services, request, body)
        await _serve(services, request, plan, precharged=True)


async def _handle_stored(services: RelayServices, request: RequestContext) -> None:
    """Handle a request for a stored response."""
    request.timeline.limits_began = perf_counter()
    with await _count_request(services, request):
        await relay_stored_response(services, request)


async def _serve(
    services: RelayServices, request: RequestContext, plan: BodyPlan, *, precharged: bool
) -> None:
    """Take a request through limits and budget to its model, or a fallback. Raises GatewayError.

    `precharged`: the request and its slot are charged already.
    """
    request.timeline.limits_began = planned_at = perf_counter()
    endpoint, bounds, binding = request.endpoint, services.bounds, request.binding
    assert binding is not None
    tokens = reserved_tokens(plan.cost, endpoint, bounds.tokenize_weight)
    terms = (binding.precharged_limits if precharged else binding.limits).terms(tokens)
    decision = services.limiter.decide_at_once(terms)
    if decision is None:
        decision = await services.limiter.decide_terms(terms)
    request.exchange.rate_lines = decision.header_lines
    with decision:
        budget: BudgetReservation | None = None
        if request.principal.has_budget and endpoint.metered:
            budget = await _reserve_budget(services, request, plan)
        model_request = ModelRequest(services, request, decision, budget, planned_at)
        chain: FallbackChain | None = None
        keep_alive: asyncio.Task[None] | None = None
        try:
            if request.output_bound is not None:
                plan = plan_request(services, request, plan.body, plan.model)
            if bounds.keepalive_s and endpoint.label in STREAMED and plan.is_true("stream"):
                # Before lease and permit: a stream that waits for them is silent as well.
                comments = send_comments(request.exchange, bounds.keepalive_s)
                keep_alive = asyncio.create_task(comments)
            if endpoint.label == RESPONSES:
                request.pinned_engine = await find_previous_engine(services, request, plan)
            if plan.model.on_demand and plan.model.fallbacks:
                chain = _fallback_chain(services, request, plan.model)
            await model_request.serve(plan, tokens, chain)
        except CANNOT_SERVE as error:
            # A traceback would keep the body until the next garbage collection.
            fault = error.with_traceback(None)
            chain = chain or _fallback_chain(services, request, plan.model)
            await Fallback(services, request, model_request, chain, fault).serve(plan, tokens)
        finally:
            if keep_alive is not None:
                keep_alive.cancel()
            if budget is not None:
                budget.close()


def _fallback_chain(
    services: RelayServices, request: RequestContext, model: Model
) -> FallbackChain | None:
    """Return the fallbacks of a request; None: it is bound to one engine."""
    if request.pinned_engine is not None:
        return None
    return FallbackChain(services, model, request)


async def _count_request(services: RelayServices, request: RequestContext) -> LimitDecision:
    """Charge a request and its slot, without tokens; the caller enters the decision.

    Raises ServiceUnavailable; entering raises RateLimited.
    """
    limiter = services.limiter
    terms = services.bindings.limits_before_body(request.principal).terms(0)
    decision = limiter.decide_at_once(terms) or await limiter.decide_terms(terms)
    request.exchange.rate_lines = decision.header_lines
    return decision


async def _reserve_budget(
    services: RelayServices, request: RequestContext, plan: BodyPlan
) -> BudgetReservation:
    """Reserve the most that a request can use of the key's and its owner's budgets.

    Sets `request.output_bound` for a request without an output limit. Raises QuotaUsedUp and
    ServiceUnavailable.
    """
    cost, principal = plan.cost, request.principal
    elastic = plan.elastic_tokens(request.endpoint.label)
    budget = await services.budgets.reserve(
        principal,
        cost.most_tokens,
        elastic,
        prompt=cost.most_prompt,
        output=cost.most_output,
        model=plan.model.name,
    )
    if elastic is not None:
        request.output_bound = (budget.tokens - cost.most_prompt) // cost.answers
    return budget


def _model_in_query(services: RelayServices, request: RequestContext) -> str:
    """Return the model of a GET: what its query names, else the only one that the key may use.

    Raises MissingModel.
    """
    named = parse_qs(request.exchange.query.decode("latin-1")).get("model", [])
    if len(named) == 1:
        return named[0]
    allows = request.principal.allows
    usable = [model.name for model in services.catalogue.models if allows(model.name)]
    if named or len(usable) != 1:
        raise MissingModel("name one model of /v1/models in the query: ?model=NAME")
    return usable[0]


def _is_quick(exchange: ClientExchange, raw: bytes) -> bool:
    """Return whether a body is parsed in a few milliseconds."""
    return not exchange.by_name.get(b"content-encoding") and is_quick(raw)


def _check_content_type(exchange: ClientExchange) -> None:
    """Raise BadRequest for JSON under another content type, which a browser has sent.

    A page of any site may make a browser send that without asking first, to a gateway without keys
    too (Fetch standard, "CORS-safelisted request-header"). `curl -d` sends no Origin.
    """
    content_type = exchange.header(b"content-type")
    if not (is_json(content_type) or is_form(content_type)):
        raise BadRequest("send the header content-type: application/json")


def _read_deadline(value: bytes, arrived: float) -> float:
    """Return the moment that a value of the header names, on the clock of `arrived`, in seconds."""
    digits = value.strip()
    ms = int(digits) if digits.isdigit() and len(digits) <= len(str(MAX_DEADLINE_MS)) else 0
    if not 0 < ms <= MAX_DEADLINE_MS:
        raise BadRequest(
            f"x-request-deadline-ms must be a whole number from 1 to {MAX_DEADLINE_MS}"
        )
    return arrived + ms / 1000


def _plan_for_model(services: RelayServices, request: RequestContext, body: ParsedBody) -> BodyPlan:
    """Return the plan for the model that a body names. Raises GatewayError."""
    by_name = request.exchange.by_name
    if b"origin" in by_name:
        _check_content_type(request.exchange)
    if DEADLINE_HEADER in by_name:
        request.deadline = _read_deadline(by_name[DEADLINE_HEADER], request.timeline.started)
    elif (max_wait_s := request.principal.max_wait_s) is not None:
        request.deadline = request.timeline.started + max_wait_s
    endpoint = request.endpoint
    binding = services.bindings.find(request.principal, body.model, endpoint, services.bounds)
    model = binding.model
    if model.split:
        hints = RequestHints(request.exchange, request.principal.id, body)
        split, bounds = binding, services.bounds
        if split.capture is not None:
            request.begin_capture(services.captures, split.capture, body)
        binding = services.bindings.find_target(split, hints.session(), endpoint, bounds)
        model = binding.model
        services.metrics.split_requests.add((split.model.name, model.name))
    request.binding = binding
    request.model = model.name
    request.requested_model = body.model
    if binding.capture is not None:
        request.begin_capture(services.captures, binding.capture, body)
    if not binding.served:
        raise model.not_served(endpoint.label, body.model)
    return plan_body(endpoint.label, body, model, binding.rules)
