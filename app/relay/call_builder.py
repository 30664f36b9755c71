"""Builds the calls of one request: the first, those after a failure, and continuations."""

import logging
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Self

import msgspec

from app.continuation import ENDPOINTS, WITH_IDS, Origin, Recording, Ways, choose_ways
from app.relay.engine_call import EngineCall, build_engine_request
from app.relay.request_context import RequestContext
from app.relay.services import RelayServices
from app.request_body import (
    RESPONSES,
    BodyPlan,
    new_response_id,
    with_response_id,
)
from app.routing import ContinuationTerms, Model, Replica

log = logging.getLogger(__name__)

_NOTHING: Mapping[str, bytes] = MappingProxyType({})


class CallBuilder(msgspec.Struct, frozen=True):
    """One request on its way to the engines of a model."""

    plan: BodyPlan
    request: RequestContext
    model: Model
    engine_id: str
    response_id: str | None  # of a response that the engine stores
    long_prompts: set[str]  # models of which the log says that a prompt was too long

    @classmethod
    def of(
        cls,
        services: RelayServices,
        plan: BodyPlan,
        request: RequestContext,
        model: Model,
    ) -> Self:
        """Return the builder of a request, with new IDs for it and for a stored response."""
        response_id = None
        if request.endpoint.label == RESPONSES:
            response_id = new_response_id(plan.rewrite, plan.body)
        engine_id = services.engine_ids.next(request.exchange.request_id)
        return cls(plan, request, model, engine_id, response_id, services.long_prompts)

    def build(self, replica: Replica) -> EngineCall:
        """Return the call of a replica's engine; its stream is recorded if it can go on."""
        terms = self.model.continuation
        if terms is None:
            return self._call(replica)
        recording = self._recording(replica, terms)
        if recording is None or recording.answer is None:
            return self._call(replica, _NOTHING, recording)
        return self._call(replica, WITH_IDS, recording)

    def build_continuation(
        self, replica: Replica, changes: Mapping[str, bytes], recording: Recording
    ) -> EngineCall:
        """Return the call of the engine at which the stream goes on."""
        recording.origin = Origin.of(replica)
        return self._call(replica, changes, recording)

    def _call(
        self,
        replica: Replica,
        more: Mapping[str, bytes] = _NOTHING,
        recording: Recording | None = None,
    ) -> EngineCall:
        plan = self.plan
        rewrite = plan.rewrite
        changes, dropped, model_line = rewrite.changes, rewrite.dropped, self.model.header_line
        if self.response_id is not None:
            changes = with_response_id(changes, self.response_id)
        if more:
            changes = {**changes, **more}
        if dropped:
            model_line += _dropped_line(dropped)
        raw = plan.body.for_engine(self.model.served_name(replica), changes, dropped)
        priority = self.request.principal.priority if replica.by_priority else None
        engine_request = build_engine_request(self.request, raw, self.engine_id, priority)
        return EngineCall(engine_request, plan, model_line, recording, replica.fingerprint)

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


def _dropped_line(names: Collection[str]) -> bytes:
    """Return the response header that names the fields which were left out."""
    return b"x-gateway-dropped-fields: %b\r\n" % ", ".join(sorted(names)).encode()
