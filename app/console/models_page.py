"""The page of models: how each is served, and the actions on it."""

from functools import partial

from fastapi import APIRouter, Request, Response

from app.api import Right
from app.console.fleet_view import FleetViews
from app.console.live import LiveByRight, Regions, Render
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.visitor import CONSOLE


def models_router(renderer: Renderer, views: FleetViews) -> APIRouter:
    """Return the route of the page."""
    router = APIRouter(prefix=CONSOLE, include_in_schema=False)

    @router.get("/models")
    async def show(request: Request) -> Response:
        visitor, models = visitor_of(request), views.models()
        render = partial(renderer.page, visitor, "models.html", models=models)
        return await renderer.in_thread(render)

    return router


def live_models(renderer: Renderer, views: FleetViews) -> LiveByRight:
    """Return the live regions: one for each model."""
    model = renderer.macro("models_regions.html", "model")

    def collect(acts: bool) -> Render:
        found = views.models()

        def render() -> Regions:
            numbered = enumerate(found)
            return {f"model {one.row.name}": model(one, number, acts) for number, one in numbered}

        return render

    return LiveByRight(Right.ENGINES_WRITE, collect)
