"""The page of the configuration: what is in force; its script plans and runs a reload."""

from collections.abc import Callable

from fastapi import APIRouter, Request, Response

from app.api import Right
from app.console.page_routes import page_router, require
from app.console.rendering import Renderer
from app.reload import settings_in_force
from app.settings import Settings


def configuration_pages(renderer: Renderer, settings: Callable[[], Settings]) -> APIRouter:
    """Return the route of the page; `settings` returns those in force."""
    router = page_router(renderer)

    @router.get("/configuration")
    async def show_configuration(request: Request) -> Response:
        """Every setting in force, without secrets."""
        visitor = require(request, Right.CONFIGURATION_WRITE)
        in_force = settings()

        def render() -> Response:
            sections = settings_in_force(in_force)
            return renderer.page(visitor, "configuration.html", sections=sections)

        return await renderer.in_thread(render)

    return router
