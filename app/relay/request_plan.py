"""The changes to a request's body and its token reservation, for one model."""

import msgspec

from app.auth import Principal
from app.relay.body import ParsedBody, check_media
from app.relay.endpoint import MESSAGES, RESPONSES
from app.relay.request_context import RequestContext
from app.relay.response_storage import restrict_storage
from app.relay.rewrite import (
    OUTPUT_FIELDS,
    Rewrite,
    bounded_output,
    has_output_limit,
    rewrite_body,
)
from app.relay.services import RelayServices
from app.relay.token_cost import Cost, check_inputs, check_sequences, estimate_cost
from app.routing import Model


class RequestPlan(msgspec.Struct, frozen=True):
    """A body, the model that it goes to, what changes in it there, and what it may cost."""

    body: ParsedBody
    model: Model
    rewrite: Rewrite
    cost: Cost


def plan_request(
    services: RelayServices,
    principal: Principal,
    request: RequestContext,
    body: ParsedBody,
    model: Model,
) -> RequestPlan:
    """Return the plan of a request for a model.

    Raises BadRequest for what this model or key does not accept.
    """
    rules = services.rules.get(model, principal)
    salt = services.salts.salt(model.isolation, principal)
    label = request.endpoint.label
    rewrite = rewrite_body(label, body, model.bounds, rules, salt)
    if label == RESPONSES:
        rewrite = restrict_storage(rewrite, body, stores=model.stores_responses)
    check_media(
        body,
        model.media_domains,
        uuids=model.isolation == "none",
        anthropic=label.startswith(MESSAGES),
    )
    cost = estimate_cost(
        label, body, rewrite, model.max_model_len, services.bounds.default_output_tokens
    )
    check_sequences(cost.answers, model.bounds.sequences)
    if label not in OUTPUT_FIELDS:
        check_inputs(body, model.bounds.inputs)
    if (bound := request.output_bound) is not None:
        rewrite = rewrite.changed(bounded_output(label, body.members, rewrite.changes, bound))
    return RequestPlan(body, model, rewrite, cost)


def elastic_tokens(label: str, plan: RequestPlan) -> tuple[int, int] | None:
    """Return the least and the most that a request without output limit takes; None: it has one."""
    body, cost = plan.body, plan.cost
    if label not in OUTPUT_FIELDS or has_output_limit(label, body.members, plan.rewrite.changes):
        return None
    return cost.prompt + cost.answers, cost.prompt + cost.plausible_output
