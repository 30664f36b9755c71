"""Requests: those in flight, those that ended, and what the time of one was spent on.

A client sees and cancels the requests of its own key, other roles those of all keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.api import status_range
from app.auth import Role
from app.console.guard import API
from app.console.key_names import KeyNames
from app.console.rendering import Renderer
from app.console.request_bar import request_bar
from app.console.request_regions import RequestRegions
from app.console.router import visitor_of
from app.console.visitor import CONSOLE, Visitor
from app.errors import BadRequest, PermissionDenied, RouteNotFound
from app.relay import OUTCOMES, RequestDirectory, RequestFilter, RequestView
from app.routing import Catalogue
from app.telemetry.logs import scrub

MAX_FILTER_CHARS = 256
NOT_FOUND = "There is no such request here, or it ended too long ago."

FilterText = Annotated[str, Query(max_length=MAX_FILTER_CHARS)]


@dataclass(frozen=True, slots=True)
class RequestPages:
    """The pages of requests."""

    renderer: Renderer
    requests: RequestDirectory
    catalogue: Catalogue
    names: KeyNames
    regions: RequestRegions

    async def show_requests(
        self,
        request: Request,
        key: FilterText = "",
        model: FilterText = "",
        status: FilterText = "",
        outcome: FilterText = "",
    ) -> Response:
        visitor, fault = visitor_of(request), ""
        chosen = RequestFilter(key_id=visitor.own_key_only)
        try:
            chosen = _filter(visitor, key, model, status, outcome)
        except BadRequest as error:
            fault = error.message
        rows = await self.regions.rows(chosen)

        def render() -> Response:
            return self.renderer.page(
                visitor,
                "requests.html",
                fault=fault,
                filter={"key": key, "model": model, "status": status, "outcome": outcome},
                refresh=f"{API}/requests?{request.url.query}",
                models=[
                    one.name for one in self.catalogue.models if visitor.principal.allows(one.name)
                ],
                outcomes=OUTCOMES,
                cancel=_cancel_path(visitor),
                rows=rows,
            )

        return await self.renderer.in_thread(render)

    async def refresh_requests(
        self,
        request: Request,
        key: FilterText = "",
        model: FilterText = "",
        status: FilterText = "",
        outcome: FilterText = "",
    ) -> Mapping[str, str]:
        """The regions of the page as they are now."""
        visitor = _checked(visitor_of(request))
        chosen = _filter(visitor, key, model, status, outcome)
        return await self.regions.html(chosen, _cancel_path(visitor))

    async def show_request(self, request: Request, id: str) -> Response:
        visitor = visitor_of(request)
        view = self.requests.find(id, visitor.own_key_only)
        if view is None:
            return self.renderer.fault(visitor, RouteNotFound(NOT_FOUND))
        shown = await self.names.find({view.record.key_id})
        return self.renderer.page(
            visitor,
            "request.html",
            view=view,
            fault=None if view.record.fault is None else scrub(view.record.fault),
            bar=request_bar(view.phases, view.record.total_s),
            names=shown,
            cancel=_cancel_path(visitor),
        )

    async def cancel_request(self, request: Request, id: str) -> dict[str, str]:
        """Cancel a request of the visitor's own key, or, for an administrator, of any."""
        visitor = _checked(visitor_of(request))
        if not _cancel_path(visitor):
            raise PermissionDenied(f"the role {visitor.role} may not cancel requests")
        view: RequestView | None = self.requests.cancel(
            id, visitor.principal.id, visitor.own_key_only
        )
        if view is None:
            raise RouteNotFound("there is no such request in flight")
        self.regions.outdate()
        return {"id": view.id}

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(prefix=CONSOLE, include_in_schema=False)
        router.get("/requests")(self.show_requests)
        router.get("/api/requests")(self.refresh_requests)
        router.get("/requests/{id}")(self.show_request)
        router.post("/api/requests/{id}/cancel")(self.cancel_request)
        return router


def _checked(visitor: Visitor) -> Visitor:
    if not visitor.sees_requests:
        raise PermissionDenied(f"the role {visitor.role} does not see requests")
    return visitor


def _cancel_path(visitor: Visitor) -> str:
    """Return the path below which a request is canceled; empty: the visitor may not."""
    return "/requests" if visitor.role in (Role.CLIENT, Role.ADMIN) else ""


def _filter(visitor: Visitor, key: str, model: str, status: str, outcome: str) -> RequestFilter:
    """Return the filter of a query. Raises BadRequest."""
    if outcome and outcome not in OUTCOMES:
        raise BadRequest(f"outcome must be one of {', '.join(OUTCOMES)}")
    return RequestFilter(
        key_id=visitor.own_key_only or key.strip() or None,
        model=model or None,
        statuses=status_range(status.strip()) if status.strip() else None,
        outcome=outcome or None,
    )
