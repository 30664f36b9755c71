"""The page of models: how each is served, and the actions on it."""

from fastapi import APIRouter, Request, Response

from app.api import Right
from app.console.fleet_view import FleetViews
from app.console.live import LiveByRight, Regions
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.visitor import CONSOLE


def models_router(renderer: Renderer, views: FleetViews) -> APIRouter:
    """Return the route of the page."""
    router = APIRouter(prefix=CONSOLE, include_in_schema=False)

    @router.get("/models")
    async def show(request: Request) -> Response:
        return renderer.page(visitor_of(request), "models.html", models=views.models())

    return router


def live_models(renderer: Renderer, views: FleetViews) -> LiveByRight:
    """Return the live regions: one for each model."""
    model = renderer.macro("models_regions.html", "model")

    def render(acts: bool) -> Regions:
        found = enumerate(views.models())
        return {f"model {view.row.name}": model(view, number, acts) for number, view in found}

    return LiveByRight(Right.ENGINES_WRITE, render)
