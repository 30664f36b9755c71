"""Serves a request whose model could not: by a fallback, or by that model once it is up."""

from app.auth import Principal
from app.errors import EngineFailed, EngineTooSlow, EngineUnavailable, GatewayError
from app.limits import LimitRequest
from app.relay.fallback_chain import CANNOT_SERVE, FallbackChain
from app.relay.model_request import ModelRequest
from app.relay.request_context import RequestContext
from app.relay.request_plan import plan_request
from app.relay.services import RelayServices
from app.request_body import BodyPlan, ParsedBody, reserved_tokens
from app.residency import Step
from app.routing import Model
from app.settings import NO_LIMITS
from app.telemetry import LOAD_WAIT

# Times that a request may return to the model it waited for: one that is up and cannot serve is
# down.
MAX_RETURNS = 2


class Fallback:
    """The way of one request after its model could not serve it. Use it once."""

    def __init__(
        self,
        services: RelayServices,
        principal: Principal,
        request: RequestContext,
        model_request: ModelRequest,
        chain: FallbackChain | None,
    ) -> None:
        """`chain` is None where the request has no fallbacks."""
        self._services = services
        self._principal = principal
        self._request = request
        self._model_request = model_request
        self._chain = chain
        # The request waits for its model only while nothing of it has reached an engine.
        self._may_wait = False
        self._yielded = False  # it has left its model for a fallback that is up sooner
        self._returns_left = MAX_RETURNS

    async def serve(self, plan: BodyPlan, limits: LimitRequest, fault: GatewayError) -> None:
        """Serve the request, which failed with `fault` at its own model. Raises GatewayError."""
        request, requested, chain = self._request, plan.model, self._chain
        request.timeline.failed(requested.name, fault.code)
        self._may_wait = isinstance(fault, EngineUnavailable)
        # While the gateway drains, no model gives a permit.
        while chain is not None and chain.any_left and not self._services.admission.draining:
            step = chain.step() if self._may_wait else Step.GIVE_UP
            model: Model | None = None
            try:
                if step is Step.WAIT and not requested.on_demand:
                    await self._model_request.wait(LOAD_WAIT, chain.wait())
                    continue
                if step is Step.WAIT or step is Step.ASK:
                    self._returns_left -= 1
                    self._may_wait = self._returns_left > 0
                    await self._model_request.serve(plan, limits, chain=chain)
                    return
                self._may_wait = self._yielded = self._may_wait and step is not Step.GIVE_UP
                model = chain.take(0 if step is Step.GIVE_UP else step)
                if model is None:
                    continue
                self._services.metrics.fallbacks.add((requested.name, model.name))
                await self._serve_fallback(plan.body, model)
                return
            except CANNOT_SERVE as error:
                request.timeline.failed(requested.name, error.code)
                if model is None:  # the requested model's
                    fault = error.with_traceback(None)
                    self._may_wait = self._may_wait and isinstance(error, EngineUnavailable)
                elif isinstance(error, (EngineFailed, EngineTooSlow)):
                    self._may_wait = False  # the request may be the cause
        await self._wait_without_fallbacks(plan, limits, fault)

    async def _wait_without_fallbacks(
        self, plan: BodyPlan, limits: LimitRequest, fault: GatewayError
    ) -> None:
        """Serve by the requested model after all, if the request left it for fallbacks that failed.

        Raises `fault` otherwise: the client gets the error of the model that it asked for.
        """
        requested = plan.model
        self._request.model = requested.name
        left_it = self._may_wait and self._yielded and requested.on_demand
        if not left_it or self._services.admission.draining:
            raise fault
        await self._model_request.serve(plan, limits, chain=self._chain)

    async def _serve_fallback(self, body: ParsedBody, model: Model) -> None:
        """Serve by a fallback, within its own limits. Raises CANNOT_SERVE.

        What the request holds of the caller's limits and of the requested model's stays.
        """
        services, request = self._services, self._request
        plan = plan_request(services, self._principal, request, body, model)
        tokens = reserved_tokens(plan.cost, request.endpoint, services.bounds.tokenize_weight)
        limits = LimitRequest(self._principal.id, NO_LIMITS, model.name, model.limits, tokens)
        with await services.limiter.decide(limits) as decision:
            self._model_request.reservation.attach(decision)
            await self._model_request.serve(plan, limits)
