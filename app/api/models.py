"""GET /v1/models, /v1/models/{id} and /version, from memory: no engine is asked."""

import re
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends

from app.api.admin_auth import Caller
from app.api.client_key import ClientKey
from app.api.error_responses import CLIENT, error_responses, rate_headers
from app.api.llama_cpp import LlamaCppStatus
from app.errors import EngineUnavailable, ModelNotFound, RouteNotFound
from app.routing import Catalogue, Model

_NUMBER = re.compile("[0-9]+")


def card(name: str, model: Model) -> dict[str, Any]:
    """Return a model as OpenAI describes one, with vLLM's max_model_len once it is known.

    vLLM's `root` is left out: for a local model it is a path on the engine's disk.
    """
    shown: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "vllm-gateway",
    }
    if model.parent is not None:
        shown["parent"] = model.parent
    if model.max_model_len is not None:
        shown["max_model_len"] = model.max_model_len
    return shown


def _age(version: str) -> list[int]:
    """Return a version's numbers, which sort as the versions do."""
    return [int(number[:9]) for number in _NUMBER.findall(version)]


def models_router(
    catalogue: Catalogue,
    client: ClientKey,
    status: Callable[[Model], LlamaCppStatus] | None = None,
) -> APIRouter:
    """Return the routes of the model list; `client` authenticates, and `status` adds the state."""
    router = APIRouter(tags=["models"], dependencies=[Depends(client)])

    def described(name: str, model: Model) -> dict[str, Any]:
        if status is None:
            return card(name, model)
        return {**card(name, model), "status": status(model).model_dump(exclude_none=True)}

    @router.get(
        "/v1/models", responses={**error_responses(*CLIENT), 200: {"headers": rate_headers()}}
    )
    async def list_models(principal: Caller) -> dict[str, Any]:
        """Every name that the caller may send as `model`, aliases included."""
        names = catalogue.names()
        cards = [described(name, model) for name, model in names if principal.allows(model.name)]
        return {"object": "list", "data": cards}

    @router.get(
        "/version",
        responses={
            **error_responses(*CLIENT, EngineUnavailable),
            200: {"headers": rate_headers()},
        },
    )
    async def show_version(principal: Caller) -> dict[str, Any]:
        """vLLM's version: that of each model the caller may use, and the oldest of them."""
        versions = {
            model.name: min(found, key=_age)
            for model in catalogue.models
            if principal.allows(model.name)
            and (found := [v for r in model.replicas if (v := r.engine.facts.version)])
        }
        if not versions:
            raise EngineUnavailable("no engine of your models has reported its version yet")
        return {"version": min(versions.values(), key=_age), "models": versions}

    # A name may hold slashes, as Hugging Face's do.
    @router.get(
        "/v1/models/{name:path}",
        responses={
            **error_responses(*CLIENT, ModelNotFound, RouteNotFound),
            200: {"headers": rate_headers()},
        },
    )
    async def retrieve_model(name: str, principal: Caller) -> dict[str, Any]:
        """One model."""
        return described(name, catalogue.find(name, principal.allows))

    return router
