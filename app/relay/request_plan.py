"""Plans a request for one model, by the rules and the salt of its tenant."""

from app.relay.request_context import RequestContext
from app.relay.services import RelayServices
from app.request_body import BodyPlan, BodyRules, ParsedBody, plan_body
from app.routing import Model


def plan_request(
    services: RelayServices,
    request: RequestContext,
    body: ParsedBody,
    model: Model,
) -> BodyPlan:
    """Return the plan of a request for a model. Raises BadRequest."""
    rules = BodyRules(
        services.rules.get(model, request.principal),
        services.salts.salt(model.isolation, request.principal),
        services.bounds.default_output_tokens,
        request.output_bound,
    )
    return plan_body(request.endpoint.label, body, model, rules)
