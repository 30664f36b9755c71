"""Plans a request's body for one model: what changes in it, and what it may cost. Pure."""

from collections.abc import Collection

import msgspec

from app.errors import MediaNotAllowed, OutputTooLong
from app.request_body.body import MemberNames, ParsedBody, check_media
from app.request_body.endpoint import IMAGE_EDITS, IN_UNITS, MESSAGES, RESPONSES, SPEECH
from app.request_body.field_rules import FieldRules
from app.request_body.media_rules import NO_ADDRESSES, check_reference, may_name_media
from app.request_body.response_storage import restrict_storage
from app.request_body.rewrite import (
    OUTPUT_FIELDS,
    ConstantRewrite,
    Rewrite,
    as_bool,
    bounded_output,
    has_output_limit,
    rewrite_body,
)
from app.request_body.token_cost import (
    Cost,
    UsualCost,
    check_inputs,
    check_sequences,
    estimate_cost,
)
from app.request_body.unit_cost import estimate_units
from app.routing import Model

# Sets of members of which the rewrite and the kind of cost are known, for each binding.
MAX_KNOWN = 8
# Members of a request for speech by which vllm-omni fetches a voice: an address, a file or more of
# them. `references` has the address further inside.
REFERENCES = frozenset({"ref_audio", "ref_audio_2", "references"})


class BodyRules(msgspec.Struct, frozen=True):
    """What tenant, gateway, budget and engines demand of a body, besides the model's bounds."""

    fields: FieldRules
    # The tenant's cache salt, encoded; None: the client's own stays.
    salt: bytes | None
    # Tokens of output reserved for a request without an output limit.
    default_output: int
    # The model's length, as far as its engines have reported it.
    longest: int | None
    # The rewrite of most bodies of an endpoint; None: each has its own.
    constant: ConstantRewrite | None = None
    # The cost of most bodies of an endpoint; None: each has its own.
    usual_cost: UsualCost | None = None
    # Tokens that a budget leaves for each answer of a request without an output limit.
    output_bound: int | None = None
    # By the names of a body's members: its rewrite, where that is the constant one, and then its
    # output limits, where its cost is the usual one.
    known: dict[MemberNames | None, tuple[Rewrite | None, Collection[str] | None]] = {}

    def learn(self, body: ParsedBody) -> tuple[Rewrite | None, Collection[str] | None]:
        """Return what is in `known` of a body from now on."""
        constant, usual = self.constant, self.usual_cost
        rewrite = limits = None
        if constant is not None and constant.holds_for(body):
            rewrite = constant.rewrite
            if usual is not None:
                limits = usual.limits_of(body.members, rewrite)
        if body.names is not None:
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            self.known[body.names] = rewrite, limits
        return rewrite, limits


class BodyPlan(msgspec.Struct, frozen=True):
    """A body, the model that it goes to, what changes in it there, and what it may cost."""

    body: ParsedBody
    model: Model
    rewrite: Rewrite
    cost: Cost

    def value(self, name: str) -> bytes:
        """Return a member as the engine gets it, encoded; b"" if there is none."""
        return self.rewrite.value(self.body, name)

    def is_true(self, name: str) -> bool:
        """Return whether the engine reads a member as true."""
        if name not in self.body.members and name not in self.rewrite.changes:
            return False
        return as_bool(self.rewrite.value(self.body, name)) is True

    def check_output_fits(self, label: str) -> None:
        """Raise BadRequest if the answer may be longer than the model's context, where known."""
        if (most := self.model.max_model_len) is None:
            return
        for name in OUTPUT_FIELDS.get(label, ()):
            asked = self.value(name)
            if asked.isdigit() and int(asked[:18]) >= most:
                raise OutputTooLong(
                    f"{name} is {asked[:18].decode()}, and the model's context has {most} tokens, "
                    "prompt and answer together",
                    name,
                )

    def elastic_tokens(self, label: str) -> tuple[int, int] | None:
        """Return the least and the most that the request takes; None: its output is limited."""
        if label not in OUTPUT_FIELDS:
            return None
        if has_output_limit(label, self.body.members, self.rewrite.changes):
            return None
        cost = self.cost
        return cost.most_prompt + cost.answers, cost.most_prompt + cost.plausible_output


def plan_body(label: str, body: ParsedBody, model: Model, rules: BodyRules) -> BodyPlan:
    """Return the plan of a body for a model, by the endpoint's label.

    Raises BadRequest for what this model or key does not accept.
    """
    usual = rules.usual_cost
    rewrite, limits = rules.known.get(body.names) or rules.learn(body)
    if rewrite is None:
        rewrite = rewrite_body(label, body, model.bounds, rules.fields, rules.salt)
        if label == RESPONSES:
            rewrite = restrict_storage(rewrite, body, stores=model.stores_responses)
        if usual is not None:
            limits = usual.limits_of(body.members, rewrite)
    media = NO_ADDRESSES
    if body.members and (body.name_ends is not None or may_name_media(body.raw)):
        media = check_media(
            body,
            model.media_domains,
            uuids=model.isolation == "none",
            anthropic=label.startswith(MESSAGES),
        )
    cost = None
    if limits is not None and usual is not None and media == NO_ADDRESSES:
        cost = usual.estimate(body, limits)
    elif label in IN_UNITS:
        _check_references(label, body, model)
        cost = estimate_units(label, body, rewrite, model.units)
        if model.bounds.sequences is not None:
            check_sequences(cost.answers, model.bounds.sequences)
    if cost is None:
        cost = estimate_cost(label, body, rewrite, rules.longest, rules.default_output, media)
        if model.bounds.sequences is not None:
            check_sequences(cost.answers, model.bounds.sequences)
        if label not in OUTPUT_FIELDS:
            check_inputs(body, model.bounds.inputs)
    if rules.output_bound is not None:
        bounded = bounded_output(label, body.members, rewrite.changes, rules.output_bound)
        rewrite = rewrite.changed(bounded)
        if label != RESPONSES:  # built-in tools run the model again, each time with this bound
            most = min(cost.plausible_output, rules.output_bound * cost.answers)
            cost = msgspec.structs.replace(cost, plausible_output=most)
    return BodyPlan(body, model, rewrite, cost)


def _check_references(label: str, body: ParsedBody, model: Model) -> None:
    """Raise MediaNotAllowed for an image or a voice that the engine would fetch."""
    if label == IMAGE_EDITS and body.addressed:
        name = min(body.addressed)
        raise MediaNotAllowed(f"{name} must be a file or a data: URL of an image here")
    if label == SPEECH:
        for name in REFERENCES.intersection(body.members):
            check_reference(name, body.members[name], model.media_domains)
