"""Builds the calls of one request: the first, those after a failure, and continuations."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

import msgspec

from app.continuation import ENDPOINTS, WITH_IDS, Recording, Ways, choose_ways
from app.relay.continuation_target import Origin
from app.relay.endpoint import COMPLETIONS, RESPONSES
from app.relay.engine_call import EngineCall
from app.relay.engine_request import build_engine_request
from app.relay.request_context import RequestContext
from app.relay.request_plan import RequestPlan
from app.relay.response_storage import new_response_id, with_response_id
from app.relay.rewrite import as_bool
from app.routing import ContinuationTerms, Model, Replica

_NOTHING: Mapping[str, bytes] = MappingProxyType({})


class CallBuilder(msgspec.Struct, frozen=True):
    """One request on its way to the engines of a model."""

    plan: RequestPlan
    request: RequestContext
    model: Model
    engine_id: str
    priority: int  # for engines that schedule by it
    response_id: str | None  # of a response that the engine stores

    @classmethod
    def of(
        cls,
        plan: RequestPlan,
        request: RequestContext,
        model: Model,
        engine_id: str,
        priority: int,
    ) -> Self:
        """Return the builder of a request, with a new ID for a response that the engine stores."""
        response_id = None
        if request.endpoint.label == RESPONSES:
            response_id = new_response_id(plan.rewrite, plan.body)
        return cls(plan, request, model, engine_id, priority, response_id)

    def build(self, replica: Replica) -> EngineCall:
        """Return the call of a replica's engine; its stream is recorded if it can go on."""
        terms = self.model.continuation
        recording = None if terms is None else self._recording(replica, terms)
        if recording is None or recording.answer is None:
            return self._call(replica, _NOTHING, recording)
        return self._call(replica, WITH_IDS, recording)

    def build_continuation(
        self, replica: Replica, changes: Mapping[str, bytes], recording: Recording
    ) -> EngineCall:
        """Return the call of the engine at which the stream goes on."""
        return self._call(replica, changes, recording)

    def _call(
        self, replica: Replica, more: Mapping[str, bytes], recording: Recording | None
    ) -> EngineCall:
        plan = self.plan
        rewrite, body = plan.rewrite, plan.body
        changes = rewrite.changes
        if self.response_id is not None:
            changes = with_response_id(changes, self.response_id)
        if more:
            changes = {**changes, **more}
        raw = body.for_engine(replica.served_name, changes, rewrite.dropped)
        priority = self.priority if replica.by_priority else None
        return EngineCall(
            request=build_engine_request(self.request, raw, self.engine_id, priority),
            prompt=plan.cost.prompt,
            withhold_usage=rewrite.withhold_usage,
            one_choice=rewrite.one_choice,
            wide=bool(rewrite.value(body, "logprobs")),
            opened=self.request.endpoint.label != COMPLETIONS,
            fingerprint=replica.fingerprint,
            withhold_metadata=rewrite.withhold_metadata,
            model_line=self.model.header_line,
            recording=recording,
            origin=None if recording is None else Origin.of(replica),
        )

    def _recording(self, replica: Replica, terms: ContinuationTerms) -> Recording | None:
        """Return the record of a stream; None where the request asks for none."""
        endpoint = self.request.endpoint.label
        rewrite, body = self.plan.rewrite, self.plan.body
        if endpoint not in ENDPOINTS or not as_bool(rewrite.value(body, "stream")):
            return None
        if self.plan.cost.prompt > terms.max_tokens:
            ways = Ways(reason="too_long")
        else:
            ways = choose_ways(
                endpoint,
                body.members.keys() | rewrite.changes.keys(),
                self.value,
                replica.engine.facts,
                stored=self.response_id is not None,
            )
        return Recording(
            endpoint,
            ways,
            terms.max_tokens,
            with_ids=as_bool(self.value("return_token_ids")) is True,
            shows_tokens=as_bool(self.value("logprobs")) is True,
            calls_tools=bool(self.value("tools")),
        )

    def value(self, name: str) -> bytes:
        """Return a member of the request as the engine gets it, encoded; b"" if there is none."""
        return self.plan.rewrite.value(self.plan.body, name)
