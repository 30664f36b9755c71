"""The pages of models: all of them with their actions, and one with its settings and memory."""

from functools import partial

from fastapi import APIRouter, Request, Response

from app.api import Right
from app.console.fleet_view import FleetViews, Sees
from app.console.live import LiveByRight, Regions, Render
from app.console.memory_plans import MemoryPlans
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.visitor import CONSOLE
from app.errors import RouteNotFound
from app.reload import model_in_force


def models_router(renderer: Renderer, views: FleetViews, plans: MemoryPlans) -> APIRouter:
    """Return the routes of the pages."""
    router = APIRouter(prefix=CONSOLE, include_in_schema=False)

    @router.get("/models")
    async def show(request: Request) -> Response:
        visitor = visitor_of(request)
        models = views.models(visitor.scope.has_model)
        render = partial(renderer.page, visitor, "models.html", models=models)
        return await renderer.in_thread(render)

    @router.get("/models/{name:path}")
    async def show_model(request: Request, name: str) -> Response:
        visitor = visitor_of(request)
        try:
            view = views.model(name, visitor.scope.has_model)
        except RouteNotFound as error:
            return renderer.fault(visitor, error)
        settings = view.settings
        return renderer.page(
            visitor,
            "model.html",
            view=view,
            settings=() if settings is None else model_in_force(settings).settings,
            plans=() if settings is None else await plans.of(settings),
        )

    return router


def live_models(renderer: Renderer, views: FleetViews) -> LiveByRight:
    """Return the live regions: one for each model."""
    model = renderer.macro("models_regions.html", "model")

    def collect(acts: bool, sees: Sees) -> Render:
        found = views.models(sees)

        def render() -> Regions:
            numbered = enumerate(found)
            return {f"model {one.row.name}": model(one, number, acts) for number, one in numbered}

        return render

    return LiveByRight(Right.ENGINES_WRITE, collect)
