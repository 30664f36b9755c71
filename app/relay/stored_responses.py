"""Responses that vLLM stores: off unless a model turns them on, and then each has an owner.

vLLM keeps a stored response in the memory of one engine, under an id that the request may choose,
for whoever asks. So the gateway chooses the id and remembers who made it, and where; for everybody
else the response does not exist.
"""

import logging
import secrets
from collections.abc import Mapping

import msgspec

from app.auth import Principal
from app.database import DatabaseUnavailable, ValuesRejected
from app.errors import (
    EngineFailed,
    EngineTooSlow,
    EngineUnavailable,
    FieldNotAllowed,
    GatewayError,
    RouteNotFound,
    ServiceUnavailable,
)
from app.relay.body import ParsedBody
from app.relay.engine_request import engine_request
from app.relay.forward import carry
from app.relay.grant import Delivery, Grant
from app.relay.request_context import RequestContext
from app.relay.response import NotRouted
from app.relay.rewrite import ABSENT, Rewrite, truth
from app.relay.services import RelayServices
from app.routing import Model, Replica
from app.stored import StoredResponse, StoredResponses
from engines.base import EngineError, EngineNotReady, EngineTimeout

log = logging.getLogger(__name__)

NO_SUCH = "there is no such response"
_FALSE = b"false"
_text = msgspec.json.Decoder(str)


def checked_storage(plan: Rewrite, body: ParsedBody, *, stores: bool) -> Rewrite:
    """Return a plan under which nothing is stored that may not be. Raises FieldNotAllowed."""
    if stores:
        return plan
    if truth(plan.value(body, "background")):
        raise _off("background")
    if plan.value(body, "previous_response_id") not in ABSENT:
        raise _off("previous_response_id")
    if truth(plan.value(body, "store")) is False:
        return plan
    return plan.changed({"store": _FALSE})  # vLLM's default is to store


def stored_id(plan: Rewrite, body: ParsedBody) -> str | None:
    """Return an id for what the engine will store of a request; None: it stores nothing."""
    store = plan.value(body, "store")
    if store == b"null" or truth(store) is False:
        return None
    return f"resp_{secrets.token_hex(16)}"


def with_id(changes: Mapping[str, bytes], response_id: str) -> Mapping[str, bytes]:
    """Return changes to a body under which its response has an id."""
    return {**changes, "request_id": msgspec.json.encode(response_id)}


async def keeper_of(
    stored: StoredResponses, previous: bytes, model: Model, principal: Principal
) -> str:
    """Return the name of the engine that keeps a response which a body names, encoded.

    Raises RouteNotFound where this caller has no such response of this model, or its engine is
    gone, and the response with it.
    """
    try:
        response_id = _text.decode(previous)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RouteNotFound(NO_SUCH) from None
    found = await _find(stored, response_id, principal)
    if found is None or found.model != model.name:
        raise RouteNotFound(NO_SUCH)
    if all(replica.engine.name != found.engine for replica in model.replicas):
        raise RouteNotFound(NO_SUCH)
    return found.engine


async def claim(
    stored: StoredResponses, response_id: str, principal: Principal, model: Model, replica: Replica
) -> None:
    """Note whose a response is, before the client can know its id.

    Raises ServiceUnavailable, and GatewayError if the database rejects the response's owner.
    """
    try:
        await stored.claim(response_id, principal.id, model.name, replica.engine.name)
    except DatabaseUnavailable:
        raise _unavailable() from None
    except ValuesRejected as error:
        log.error("response %s not stored: %s", response_id, error)
        raise GatewayError("the response cannot be stored; retrying will not help") from None


async def relay_stored(
    services: RelayServices, principal: Principal, request: RequestContext
) -> None:
    """Relay a request for a stored response to the engine that keeps it. Raises GatewayError.

    Nothing of its body goes there: what there is to say stands in its path.
    """
    exchange = request.exchange
    with await services.admission.permit(None, principal.id):
        model, replica = await _keeping(services, principal, exchange.path)
        request.model, request.engine = model.name, replica.engine.name
        request.trace.begin_attempt(replica.engine.name)
        engine_id = services.engine_ids.next(exchange.request_id)
        grant = Grant(engine_request(request, b"", engine_id), model_line=model.header_line)
        gaps = services.metrics.inter_token_latency.buckets((model.name,))
        replica.in_flight += 1
        try:
            await carry(replica.engine, grant, request, gaps, Delivery())
        except EngineNotReady as error:
            request.engine = None
            raise EngineUnavailable("the engine that keeps this is not up") from error
        except EngineTimeout as error:
            raise EngineTooSlow("no answer from the engine in time") from error
        except EngineError as error:
            raise EngineFailed("the engine failed; try again") from error
        except NotRouted:
            raise RouteNotFound(NO_SUCH) from None
        finally:
            replica.in_flight -= 1


async def _keeping(
    services: RelayServices, principal: Principal, path: str
) -> tuple[Model, Replica]:
    """Return the model and the engine of the stored response in a path.

    Raises RouteNotFound where this caller has none of that id, or its engine is gone.
    """
    found = await _find(services.stored, path.split("/")[3], principal)
    if found is None or not principal.allows(found.model):
        raise RouteNotFound(NO_SUCH)
    for model in services.catalogue.models:
        for replica in model.replicas:
            if model.name == found.model and replica.engine.name == found.engine:
                return model, replica
    raise RouteNotFound(NO_SUCH)  # its engine is gone, and it was in that engine's memory


async def _find(
    stored: StoredResponses, response_id: str, principal: Principal
) -> StoredResponse | None:
    try:
        return await stored.find(response_id, principal.id)
    except DatabaseUnavailable:
        raise _unavailable() from None


def _unavailable() -> ServiceUnavailable:
    return ServiceUnavailable("the owners of stored responses cannot be asked; try again")


def _off(name: str) -> FieldNotAllowed:
    return FieldNotAllowed(f"{name}: this model stores no responses", name)
