"""The page of the playground and the models that it offers."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from app.console.command_line import parse
from app.console.fleet_view import start_progress
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.visitor import CONSOLE, Visitor
from app.errors import PermissionDenied
from app.routing import Catalogue, Model
from app.usage import Price

PriceOf = Callable[[str], Price | None]

# What the page has a form for, and the endpoint behind each.
FORMS = {
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "score": "/v1/score",
}

# Of vllm.SamplingParams, as vllm/entrypoints/openai/chat_completion/protocol.py has them.
VLLM_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
TOOLS_FLAG = "--enable-auto-tool-choice"


def playground_router(renderer: Renderer, catalogue: Catalogue, price_of: PriceOf) -> APIRouter:
    """Return the routes; `price_of` returns the present price of a model's tokens."""
    router = APIRouter(prefix=CONSOLE, include_in_schema=False)

    @router.get("/playground")
    async def playground(request: Request) -> Response:
        return renderer.page(visitor_of(request), "playground.html")

    @router.get("/api/playground/models")
    async def models(request: Request) -> dict[str, Any]:
        """Every name that the session's key may send as `model`."""
        allows = _who_chats(request).principal.allows
        rows = [
            _row(name, model, price_of(model.name))
            for name, model in catalogue.names()
            if allows(model.name)
        ]
        return {"models": rows}

    return router


def _who_chats(request: Request) -> Visitor:
    visitor = visitor_of(request)
    if not visitor.may_chat:
        raise PermissionDenied(f"the role {visitor.role} may not use models")
    return visitor


def _row(name: str, model: Model, price: Price | None) -> dict[str, Any]:
    starts = [start_progress(replica.engine) for replica in model.replicas]
    starting = next((start for start in starts if start is not None), None)
    free = price is None or not (price.prompt or price.cached or price.completion)
    return {
        "name": name,
        "alias_of": None if name == model.name else model.name,
        "ready": model.ready > 0,
        # Of the first engine that starts, while none is ready.
        "starting": asdict(starting) if starting is not None and not model.ready else None,
        "on_demand": model.on_demand,
        "max_model_len": model.max_model_len,
        "defaults": _sampling_defaults(model),
        "tools": _may_call_tools(model),
        "forms": [form for form, endpoint in FORMS.items() if model.serves(endpoint)],
        # In 1/1,000,000,000 of the configuration's currency, for a million tokens.
        "price": None if free else msgspec.to_builtins(price),
    }


def _sampling_defaults(model: Model) -> Mapping[str, float | int | str | bool] | None:
    """Return what vLLM takes for fields that a request leaves out; None: it is not our vLLM."""
    engines = [replica.engine for replica in model.replicas]
    if not engines or not all(engine.capabilities.managed for engine in engines):
        return None
    return {**VLLM_DEFAULTS, **(engines[0].facts.sampling_defaults or {})}


def _may_call_tools(model: Model) -> bool:
    """Return whether an engine is known to parse calls of tools, or may."""
    engines = [replica.engine for replica in model.replicas]
    return any(
        not engine.capabilities.managed or TOOLS_FLAG in parse(engine.describe()).flags
        for engine in engines
    )
