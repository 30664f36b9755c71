"""Serves a request whose model could not: by a fallback, or by that model once it is up."""

from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec

from app.errors import (
    EngineFailed,
    EngineOverloaded,
    EngineTooSlow,
    EngineUnavailable,
    GatewayError,
)
from app.limits import LimitRequest
from app.relay.attempts import ATTEMPTS_AFTER_SENDING
from app.relay.fallback_chain import CANNOT_SERVE, FallbackChain
from app.relay.lost_engine import LostEngine
from app.relay.model_request import ModelRequest, plan_request
from app.relay.request_context import RequestContext
from app.relay.services import RelayServices
from app.request_body import BodyPlan, ParsedBody, reserved_tokens
from app.residency import Ask, GiveUp, Use, Wait
from app.routing import Model
from app.settings import NO_LIMITS
from app.telemetry import LOAD_WAIT

# Times that a request may return to the model it waited for: one that is up and cannot serve is
# down.
MAX_RETURNS = 2


class Fallback(msgspec.Struct, eq=False):
    """Serves one request after its model could not. Use it once.

    | next step                          | what follows                                           |
    |------------------------------------|--------------------------------------------------------|
    | Wait for a model that starts       | the request waits for the start, then decides again    |
    | Wait for a model on demand, or Ask | it goes to its own model, at most MAX_RETURNS times    |
    | Use                                | it goes to this fallback, and may come back            |
    | GiveUp                             | it goes to the first fallback left, and never back     |

    Where no fallback is left it goes by `FallbackChain.own_step`: a restart is a pause.

    A request that was at an engine goes to the fallbacks at once: it may be the cause of the
    failure. It returns to its own model only if that engine died, and only once.
    """

    _services: RelayServices
    _request: RequestContext
    _model_request: ModelRequest
    _chain: FallbackChain | None  # None: only one engine may serve
    _fault: GatewayError  # of its own model
    _may_wait: bool = False
    # The engine that died with it, or refused it while it counts as READY.
    _lost: LostEngine | None = None
    _waited: bool = False  # for its own model
    _yielded: bool = False  # it has left its model for a fallback that is up sooner
    _returns_left: int = MAX_RETURNS

    def __post_init__(self) -> None:
        self._may_wait = isinstance(self._fault, EngineUnavailable)
        self._lost = self._request.lost_engine
        self._model_request.planned_at = 0.0

    async def serve(self, plan: BodyPlan, tokens: int) -> None:
        """Serve the request, which may take so many tokens.

        Raises the error of its own model if no model serves it.
        """
        requested, chain, at_model = plan.model, self._chain, self._model_request
        self._request.timeline.failed(requested.name, self._fault.code)
        # While the gateway drains, no model gives a permit.
        while chain is not None and chain.untried and not self._services.admission.draining:
            match chain.next_step() if self._may_wait else GiveUp():
                case Wait() if not requested.on_demand:
                    await self._try_own(requested, at_model.wait(LOAD_WAIT, chain.wait()))
                case Wait() | Ask():
                    self._returns_left -= 1
                    self._may_wait = self._returns_left > 0
                    if await self._try_own(requested, at_model.serve(plan, tokens, chain)):
                        return
                case Use(index):
                    self._yielded = True
                    if await self._try_fallback(requested, chain.take(index), plan.body):
                        return
                case GiveUp():
                    self._may_wait = False
                    if await self._try_fallback(requested, chain.take(0), plan.body):
                        return
        # It may have left its own model for fallbacks that failed.
        self._request.model = requested.name
        if chain is None or not await self._serve_own(plan, tokens, chain):
            raise self._fault

    async def _serve_own(self, plan: BodyPlan, tokens: int, chain: FallbackChain) -> bool:
        """Return whether its own model served the request, once that was up again."""
        requested, at_model = plan.model, self._model_request
        admission = self._services.admission
        while self._may_return(requested) and not admission.draining:
            step = partial(chain.own_step, self._lost)
            match step():
                case Wait():
                    self._waited = True
                    await self._try_own(requested, at_model.wait(LOAD_WAIT, chain.wait(step)))
                case GiveUp() if self._lost is not None or not self._waited:
                    return False
                # One that has waited in vain asks as well: for an error with the time that is left.
                case Ask() | GiveUp():
                    self._returns_left = 0 if requested.on_demand else self._returns_left - 1
                    if await self._try_own(requested, at_model.serve(plan, tokens, chain)):
                        return True
                    self._lost = self._request.lost_engine
                    self._waited = False
        return False

    def _may_return(self, requested: Model) -> bool:
        if self._lost is not None:
            may_return = self._request.deaths < ATTEMPTS_AFTER_SENDING
        else:
            may_return = self._may_wait and (self._yielded or not requested.on_demand)
        return may_return and self._returns_left > 0

    async def _try_own(self, requested: Model, attempt: Coroutine[Any, Any, object]) -> bool:
        """Return whether an attempt at the requested model succeeded."""
        try:
            await attempt
        except CANNOT_SERVE as error:
            self._request.timeline.failed(requested.name, error.code)
            self._fault = error.with_traceback(None)
            if isinstance(error, EngineOverloaded):
                self._lost = None
            self._may_wait = self._may_wait and isinstance(error, EngineUnavailable)
            return False
        return True

    async def _try_fallback(self, requested: Model, model: Model | None, body: ParsedBody) -> bool:
        """Return whether a fallback served the request; None: it cannot serve it."""
        if model is None:
            return False
        self._services.metrics.fallbacks.add((requested.name, model.name))
        try:
            await self._serve_fallback(body, model)
        except CANNOT_SERVE as error:
            self._request.timeline.failed(requested.name, error.code)
            if isinstance(error, (EngineFailed, EngineTooSlow)):
                self._may_wait = False
            return False
        return True

    async def _serve_fallback(self, body: ParsedBody, model: Model) -> None:
        """Serve by a fallback, within its own limits and at its own price. Raises CANNOT_SERVE.

        What the request holds of the caller's limits and of the requested model's stays.
        """
        services, request = self._services, self._request
        rules = services.bounds.capture
        if rules is not None and rules.covers(request.principal, model.name):
            request.begin_capture(services.captures, rules, body)
        plan = plan_request(services, request, body, model)
        tokens = reserved_tokens(plan.cost, request.endpoint, services.bounds.tokenize_weight)
        if (budget := self._model_request.budget) is not None:
            cost, bound = plan.cost, request.output_bound
            output = cost.most_output if bound is None else bound * cost.answers
            services.budgets.cover(budget, prompt=cost.most_prompt, output=output, model=model.name)
        limits = LimitRequest(request.principal.id, NO_LIMITS, model.name, model.limits, tokens)
        with await services.limiter.decide(limits) as decision:
            self._model_request.fallback = decision
            await self._model_request.serve(plan, tokens)
