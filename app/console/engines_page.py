"""The pages of engines: all of them side by side, and one with its command line and its log."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.api import Right
from app.console.comparison import compare, fact_rows
from app.console.fleet_view import EngineView, FleetViews, Sees
from app.console.live import LiveByRight, Regions, Render
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.sorting import Sorting, Value
from app.console.visitor import CONSOLE
from app.errors import RouteNotFound
from engines.base import EngineFacts, EngineState

# Columns of the comparison that nobody has chosen, and that a table can have at all.
DEFAULT_COMPARED = 6
MAX_COMPARED = 24
COLUMNS: Mapping[str, Callable[[EngineView], Value]] = {
    "engine": lambda one: one.row.name,
    "model": lambda one: one.row.model,
    "state": lambda one: one.row.state,
    "in_flight": lambda one: one.row.in_flight,
    "restarts": lambda one: one.row.restarts,
    "memory": lambda one: one.row.memory_gib,
}


def engines_router(renderer: Renderer, views: FleetViews) -> APIRouter:
    """Return the routes of the pages."""
    router = APIRouter(prefix=CONSOLE, include_in_schema=False)

    @router.get("/engines")
    async def show_engines(
        request: Request,
        compared: Annotated[list[str] | None, Query(alias="engine", max_length=1000)] = None,
        rows: Annotated[str, Query(max_length=32)] = "",
        sort: Annotated[str, Query(max_length=32)] = "",
    ) -> Response:
        sees = visitor_of(request).scope.has_model
        engines = views.engines(sees)
        unused = [one for one in views.unused() if sees(one.model)]
        chosen, sorting = choose(engines, compared), _sorting(sort)

        def render() -> Response:
            return renderer.page(
                visitor_of(request),
                "engines.html",
                engines=engines,
                sorting=sorting,
                unused=unused,
                comparison=compare(chosen),
                comparable=comparable(engines),
                only_differences=rows != "all",
            )

        return await renderer.in_thread(render)

    @router.get("/engines/{name}")
    async def show_engine(request: Request, name: str, tab: str = "") -> Response:
        visitor = visitor_of(request)
        try:
            engine = views.engine(name, visitor.scope.has_model)
        except RouteNotFound as error:
            return renderer.fault(visitor, error)
        shown = "log" if tab == "log" else "state"
        return renderer.page(
            visitor, "engine.html", engine=engine, facts=fact_rows(engine), tab=shown
        )

    return router


def _sorting(chosen: str = "") -> Sorting[EngineView]:
    return Sorting(f"{CONSOLE}/engines", COLUMNS, chosen)


def comparable(engines: Iterable[EngineView]) -> list[EngineView]:
    """Return the engines that run here and have not failed: others have no facts to compare."""
    return [
        one for one in engines if one.row.kind != "remote" and one.row.state != EngineState.FAILED
    ]


def choose(engines: list[EngineView], names: list[str] | None) -> list[EngineView]:
    """Return the engines to compare: those that are named, or the first ones that can be.

    An engine that has never been up would differ from the others in every fact.
    """
    found = comparable(engines)
    if not names:
        up = [one for one in found if one.row.facts != EngineFacts()]
        return (up if len(up) > 1 else found)[:DEFAULT_COMPARED]
    wanted = set(names)
    return [one for one in found if one.row.name in wanted][:MAX_COMPARED]


def live_engines(renderer: Renderer, views: FleetViews) -> LiveByRight:
    """Return the live regions of both pages: the list, and one for each engine."""
    listed = renderer.macro("engines_regions.html", "engines")
    state = renderer.macro("engines_regions.html", "state")
    not_used = renderer.macro("engines_regions.html", "unused")
    unsorted = _sorting()  # a page that is sorted puts the rows in its order

    def collect(acts: bool, sees: Sees) -> Render:
        engines = views.engines(sees)
        unused = [one for one in views.unused() if sees(one.model)]

        def render() -> Regions:
            states = {f"engine {one.row.name}": state(one, acts) for one in engines}
            return {"engines": listed(engines, unsorted), "unused": not_used(unused), **states}

        return render

    return LiveByRight(Right.ENGINES_WRITE, collect)
