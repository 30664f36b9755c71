"""Stored responses: each has an owner, and for every other key it does not exist."""

import logging

import msgspec

from app.database import DatabaseUnavailable, ValuesRejected
from app.errors import (
    EngineFailed,
    EngineTooSlow,
    EngineUnavailable,
    GatewayError,
    RouteNotFound,
    ServiceUnavailable,
)
from app.relay.engine_call import CallResult, EngineCall, build_engine_request
from app.relay.forward import forward
from app.relay.request_context import RequestContext
from app.relay.response import NotRouted
from app.relay.services import RelayServices
from app.request_body import ABSENT, BodyPlan, Cost, ParsedBody, Rewrite
from app.routing import Model, Replica, quote_name
from app.stored import StoredResponse, StoredResponses
from engines.base import EngineError, EngineNotReady, EngineTimeout

log = logging.getLogger(__name__)

_NO_BODY, _NO_COST = ParsedBody("", b"", {}), Cost(0, 0, 0)
_text = msgspec.json.Decoder(str)


async def find_previous_engine(
    services: RelayServices, request: RequestContext, plan: BodyPlan
) -> str | None:
    """Return the name of the engine that stores the response which a request continues; None: none.

    Raises RouteNotFound where the caller has no such response of this model, or its engine has been
    removed, and the response with it.
    """
    previous = plan.value("previous_response_id")
    if previous in ABSENT:
        return None
    model = services.catalogue.current(plan.model)
    try:
        response_id = _text.decode(previous)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RouteNotFound("previous_response_id must be a string") from None
    found = await _find(services, request, response_id)
    engines = [replica.engine.name for replica in model.replicas]
    if found is None or found.model != model.name or found.engine not in engines:
        raise not_found(response_id)
    return found.engine


async def claim(
    stored: StoredResponses, response_id: str, key_id: str, model: Model, replica: Replica
) -> None:
    """Record the owner of a response, before the client can know its ID.

    Raises ServiceUnavailable, and GatewayError if the database rejects the response's owner.
    """
    try:
        await stored.claim(response_id, key_id, model.name, replica.engine.name)
    except DatabaseUnavailable:
        raise _unavailable() from None
    except ValuesRejected as error:
        log.error("response %s not stored: %s", response_id, error)
        raise GatewayError("the response cannot be stored; retrying will not help") from None


async def relay_stored_response(services: RelayServices, request: RequestContext) -> None:
    """Relay a request for a stored response to the engine that has it. Raises GatewayError.

    Its body is not forwarded: the path says everything.
    """
    exchange = request.exchange
    with await services.admission.acquire(None, request.principal.id):
        model, replica = await _find_replica(services, request)
        request.model, request.engine = model.name, replica.engine.name
        request.timeline.begin_attempt(replica.engine.name)
        engine_id = services.engine_ids.next(exchange.request_id)
        plan = BodyPlan(_NO_BODY, model, Rewrite(), _NO_COST)
        call = EngineCall(build_engine_request(request, b"", engine_id), plan, model.header_line)
        replica.in_flight += 1
        try:
            await forward(services, replica, call, request, CallResult())
        except EngineNotReady as error:
            request.engine = None
            raise EngineUnavailable("the engine that keeps this is not up") from error
        except EngineTimeout as error:
            raise EngineTooSlow("no answer from the engine in time") from error
        except EngineError as error:
            raise EngineFailed("the engine failed; try again") from error
        except NotRouted:
            raise not_found(_id_of(request)) from None
        finally:
            replica.in_flight -= 1


async def _find_replica(services: RelayServices, request: RequestContext) -> tuple[Model, Replica]:
    """Return the model and the replica of the stored response in a path.

    Raises RouteNotFound where the caller has none of that ID, or its engine has been removed.
    """
    response_id = _id_of(request)
    found = await _find(services, request, response_id)
    allows = request.principal.allows
    if found is None or not services.catalogue.may_use(found.model, allows):
        raise not_found(response_id)
    if (model := services.catalogue.get(found.model)) is not None:
        for replica in model.replicas:
            if replica.engine.name == found.engine:
                return model, replica
    raise not_found(response_id)  # it was in the memory of its engine


def _id_of(request: RequestContext) -> str:
    """Return the ID of the stored response in a path."""
    return request.exchange.path.split("/")[3]


def not_found(response_id: str) -> RouteNotFound:
    """Return the error for a response that does not exist, or belongs to another key."""
    return RouteNotFound(f"there is no response {quote_name(response_id)}")


async def _find(
    services: RelayServices, request: RequestContext, response_id: str
) -> StoredResponse | None:
    try:
        return await services.stored.find(response_id, request.principal.id)
    except DatabaseUnavailable:
        raise _unavailable() from None


def _unavailable() -> ServiceUnavailable:
    return ServiceUnavailable("the owners of stored responses cannot be looked up; try again")
