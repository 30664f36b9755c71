"""The overview: what runs, what loads, what failed and why."""

from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request, Response

from app.console.live import LivePage, Regions
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.visitor import CONSOLE
from app.fleet import EngineRow, ModelRow, engine_rows
from app.routing import Catalogue

ModelRows = Callable[[], Sequence[ModelRow]]


def overview_router(renderer: Renderer, catalogue: Catalogue, model_rows: ModelRows) -> APIRouter:
    """Return the route of the overview."""
    router = APIRouter(prefix=CONSOLE, include_in_schema=False)

    @router.get("/overview")
    async def overview(request: Request) -> Response:
        return renderer.page(
            visitor_of(request),
            "overview.html",
            models=model_rows(),
            engines=engine_rows(catalogue),
        )

    return router


def live_overview(renderer: Renderer, catalogue: Catalogue, model_rows: ModelRows) -> LivePage:
    """Return the live regions of the overview."""
    models = renderer.macro("overview_regions.html", "models")
    engines = renderer.macro("overview_regions.html", "engines")

    def render() -> Regions:
        rows: list[EngineRow] = engine_rows(catalogue)
        return {"models": models(model_rows()), "engines": engines(rows)}

    return LivePage(render)
