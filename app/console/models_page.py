"""The pages of models: a table of all of them, and one with its settings and memory."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.api import Right
from app.console.fleet_view import FleetViews, Sees
from app.console.live import LiveByRight, Regions, Render
from app.console.memory_plans import MemoryPlans
from app.console.models_table import ModelTable, sorting_of
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.visitor import CONSOLE
from app.errors import RouteNotFound
from app.reload import model_in_force


def models_router(
    renderer: Renderer, views: FleetViews, table: ModelTable, plans: MemoryPlans
) -> APIRouter:
    """Return the routes of the pages."""
    router = APIRouter(prefix=CONSOLE, include_in_schema=False)

    @router.get("/models")
    async def show(request: Request, sort: Annotated[str, Query(max_length=32)] = "") -> Response:
        visitor = visitor_of(request)
        lines, sorting = table.lines(visitor.scope.has_model), sorting_of(sort)

        def render() -> Response:
            return renderer.page(visitor, "models.html", lines=lines, sorting=sorting)

        return await renderer.in_thread(render)

    @router.get("/models/{name:path}")
    async def show_model(request: Request, name: str, tab: str = "") -> Response:
        visitor = visitor_of(request)
        try:
            view = views.model(name, visitor.scope.has_model)
        except RouteNotFound as error:
            return renderer.fault(visitor, error)
        settings = view.settings
        sees_settings = settings is not None and visitor.may(Right.ENGINES_WRITE)
        shown = "settings" if tab == "settings" and sees_settings else "state"
        return renderer.page(
            visitor,
            "model.html",
            view=view,
            tab=shown,
            sees_settings=sees_settings,
            settings=() if settings is None else model_in_force(settings).settings,
            plans=await plans.of(settings) if settings is not None and shown == "state" else (),
        )

    return router


def live_models(renderer: Renderer, table: ModelTable) -> LiveByRight:
    """Return the live regions of both pages: the table, and one for each model."""
    listed = renderer.macro("models_table.html", "models")
    model = renderer.macro("models_regions.html", "model")
    unsorted = sorting_of()  # a page that is sorted puts the rows in its order

    def collect(acts: bool, sees: Sees) -> Render:
        lines = table.lines(sees)

        def render() -> Regions:
            each = {f"model {line.view.row.name}": model(line.view, acts) for line in lines}
            return {"models": listed(lines, None, unsorted, acts), **each}

        return render

    return LiveByRight(Right.ENGINES_WRITE, collect)
