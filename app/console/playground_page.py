"""The page of the playground and the models that it offers."""

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

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
    free = price is None or not (price.prompt or price.cached or price.completion)
    return {
        "name": name,
        "alias_of": None if name == model.name else model.name,
        "ready": model.ready > 0,
        "on_demand": model.on_demand,
        "max_model_len": model.max_model_len,
        "forms": [form for form, endpoint in FORMS.items() if model.serves(endpoint)],
        # In 1/1,000,000,000 of the configuration's currency, for a million tokens.
        "price": None if free else msgspec.to_builtins(price),
    }
