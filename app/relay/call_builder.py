"""Builds the calls of one request: the first, those after a failure, and continuations."""

import logging
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from app.continuation import ENDPOINTS, WITH_IDS, Origin, Recording, Ways, choose_ways
from app.relay.engine_call import CHATS, EngineCall, build_engine_request
from app.relay.request_context import RequestContext
from app.relay.services import RelayServices
from app.request_body import RESPONSES, BodyPlan, new_response_id, with_response_id
from app.routing import ContinuationTerms, Model, Replica

log = logging.getLogger(__name__)

_NOTHING: Mapping[str, bytes] = MappingProxyType({})


class CallBuilder(msgspec.Struct, frozen=True):
    """One request on its way to the engines of a model, under one ID."""

    plan: BodyPlan
    request: RequestContext
    model: Model
    engine_id: str
    response_id: str | None  # of a response that the engine stores
    long_prompts: set[str]  # models of which the log says that a prompt was too long

    @classmethod
    def of(
        cls, services: RelayServices, request: RequestContext, plan: BodyPlan, model: Model
    ) -> "CallBuilder":
        """Return the builder of a request's calls, whose ID nothing else has."""
        engine_id = services.engine_ids.next(request.exchange.request_id)
        stores = request.endpoint.label == RESPONSES
        response_id = new_response_id(plan.rewrite, plan.body) if stores else None
        return cls(plan, request, model, engine_id, response_id, services.long_prompts)

    def build(
        self,
        replica: Replica,
        more: Mapping[str, bytes] = _NOTHING,
        recording: Recording | None = None,
    ) -> EngineCall:
        """Return the call of a replica's engine; a new stream is recorded if it can go on.

        With `more` changes and its `recording`, a stream goes on at this engine.
        """
        plan, request, model = self.plan, self.request, self.model
        rewrite, model_line = plan.rewrite, model.header_line
        changes, dropped, opening = rewrite.changes, rewrite.dropped, rewrite.opening
        if recording is None and model.continuation is not None:
            recording = self._recording(replica, model.continuation)
            if recording is not None and recording.answer is not None:
                more = WITH_IDS
        if self.response_id is not None:
            changes, opening = with_response_id(changes, self.response_id), b""
        if more:
            changes, opening = {**changes, **more}, b""
        if dropped:
            names = ", ".join(sorted(dropped)).encode()
            model_line += b"x-gateway-dropped-fields: %b\r\n" % names
        raw = plan.body.for_engine(model.served_name(replica), changes, dropped, opening)
        priority = request.principal.priority if replica.by_priority else None
        engine_request = build_engine_request(request, raw, self.engine_id, priority)
        both_fields = model.both_reasoning_fields and request.endpoint.label in CHATS
        return EngineCall(
            engine_request, plan, model_line, recording, replica.fingerprint, both_fields
        )

    def _recording(self, replica: Replica, terms: ContinuationTerms) -> Recording | None:
        """Return the record of a stream; None where the request asks for none."""
        endpoint = self.request.endpoint.label
        plan = self.plan
        if endpoint not in ENDPOINTS or not plan.is_true("stream"):
            return None
        if plan.cost.prompt > terms.max_tokens:
            ways = Ways(reason="too_long")
            self._log_long_prompt(terms.max_tokens)
        else:
            ways = choose_ways(
                endpoint,
                plan.body.members.keys() | plan.rewrite.changes.keys(),
                plan.value,
                replica.engine.facts,
                stored=self.response_id is not None,
            )
        return Recording(
            endpoint,
            ways,
            terms,
            Origin.of(replica),
            with_ids=plan.is_true("return_token_ids"),
            shows_tokens=plan.is_true("logprobs"),
            calls_tools=bool(plan.value("tools")),
        )

    def _log_long_prompt(self, max_tokens: int) -> None:
        """Log the first prompt of a model that is too long to be recorded."""
        model = self.model.name
        if model not in self.long_prompts:
            self.long_prompts.add(model)
            log.info(
                "stream of model %s cannot go on if it is interrupted: about %d tokens of prompt, "
                "and continuation_max_tokens is %d (logged once)",
                model,
                self.plan.cost.prompt,
                max_tokens,
                extra=self.request.log_fields,
            )
