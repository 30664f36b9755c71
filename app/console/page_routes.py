"""Routers of pages, whose errors are pages too."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from app.api import Right, has_right, notes_of
from app.auth import UnknownKey, UnknownOwner
from app.console.language import Message, noop
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.visitor import CONSOLE, Visitor
from app.database import DatabaseBusy, DatabaseUnavailable
from app.errors import GatewayError, PermissionDenied, RouteNotFound, ServiceUnavailable


def page_router(renderer: Renderer) -> APIRouter:
    """Return a router below /console; what its routes raise is shown on a page."""

    class PageRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_or_explain(request: Request) -> Response:
                try:
                    return await handle(request)
                except (GatewayError, UnknownKey, UnknownOwner, DatabaseUnavailable) as error:
                    known = _known(error)
                    notes_of(request.scope).fault = str(known.message)
                    return renderer.fault(visitor_of(request), known)

            return handle_or_explain

    return APIRouter(prefix=CONSOLE, include_in_schema=False, route_class=PageRoute)


def require(request: Request, right: Right, *, scoped: bool = False) -> Visitor:
    """Return the visitor of a page. Raises PermissionDenied without the right.

    `scoped`: the page shows only what is in the scope of its visitor; visitors with a scope see no
    other page.
    """
    visitor = visitor_of(request)
    if not has_right(visitor.principal, right, scoped=scoped):
        raise PermissionDenied(
            Message("The role %(role)s does not see this page.", role=visitor.role)
        )
    return visitor


def _known(error: Exception) -> GatewayError:
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, DatabaseBusy):
        return ServiceUnavailable(noop("Too many pages are read now. Try again in a moment."))
    if isinstance(error, DatabaseUnavailable):
        return ServiceUnavailable(noop("The database does not answer. Try again in a moment."))
    return RouteNotFound(str(error))
