"""What is to be done about a body at one model: what changes in it, and what it may cost."""

import msgspec

from app.auth import Principal
from app.relay.body import ParsedBody, check_media
from app.relay.endpoint import Endpoint
from app.relay.rewrite import (
    MESSAGES,
    OUTPUT_FIELDS,
    RESPONSES,
    Rewrite,
    bounded_output,
    rewrite,
    states_output,
)
from app.relay.services import RelayServices
from app.relay.stored_responses import checked_storage
from app.relay.token_cost import Cost, check_inputs, check_sequences, cost_of
from app.routing import Model


class Planned(msgspec.Struct, frozen=True):
    """What is to be done about a body at one model."""

    body: ParsedBody
    model: Model
    rewrite: Rewrite
    cost: Cost


def plan_body(
    rooms: RelayServices,
    endpoint: Endpoint,
    principal: Principal,
    body: ParsedBody,
    model: Model,
    output_bound: int | None,
) -> Planned:
    """Return what to change in a body for a model, and what to reserve there.

    `output_bound` is what a budget leaves each answer of a request that states no length. Raises
    BadRequest for what this model or key does not take.
    """
    rules = rooms.rules.of(model, principal)
    salt = rooms.salts.salt(model.isolation, principal)
    label = endpoint.label
    plan = rewrite(label, body, model.bounds, rules, salt)
    if label == RESPONSES:
        plan = checked_storage(plan, body, stores=model.stores_responses)
    check_media(
        body,
        model.media_domains,
        uuids=model.isolation == "none",
        anthropic=label.startswith(MESSAGES),
    )
    cost = cost_of(label, body, plan, model.max_model_len, rooms.bounds.unstated_output)
    check_sequences(cost.answers, model.bounds.sequences)
    if label not in OUTPUT_FIELDS:
        check_inputs(body, model.bounds.inputs)
    if output_bound is not None:
        plan = plan.changed(bounded_output(label, body.members, plan.changes, output_bound))
    return Planned(body, model, plan, cost)


def elastic_tokens(label: str, planned: Planned) -> tuple[int, int] | None:
    """Return the least and the most a request may take that does not say; None: it does."""
    body, cost = planned.body, planned.cost
    if label not in OUTPUT_FIELDS or states_output(label, body.members, planned.rewrite.changes):
        return None
    return cost.prompt + cost.answers, cost.prompt + cost.plausible_output
