"""Requests: those in flight, those that ended, and what the time of one was spent on.

A client sees and cancels the requests of its own key, other roles those of all keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.api import client_address
from app.audit import Action, Actor, AuditRecord, AuditTrail
from app.auth import Role, UnknownKey
from app.console.guard import API
from app.console.key_names import KeyNames
from app.console.rendering import Renderer
from app.console.request_bar import request_bar
from app.console.request_chips import chips_of, path_of
from app.console.request_regions import ENDED_ROWS, RequestRegions
from app.console.requests_query import RequestsQuery
from app.console.router import visitor_of
from app.console.visitor import CONSOLE, Visitor
from app.errors import BadRequest, PermissionDenied, RouteNotFound, ServiceUnavailable
from app.relay import RequestDirectory, RequestView
from app.routing import Catalogue
from app.telemetry.logs import scrub
from app.usage import Order

NOT_FOUND = "There is no such request here, or it is no longer kept."


@dataclass(frozen=True, slots=True)
class RequestPages:
    """The pages of requests."""

    renderer: Renderer
    requests: RequestDirectory
    catalogue: Catalogue
    names: KeyNames
    regions: RequestRegions
    audit: AuditTrail

    async def show_requests(
        self, request: Request, query: Annotated[RequestsQuery, Query()]
    ) -> Response:
        visitor, fault = visitor_of(request), ""
        try:
            query = await self._by_id(query, visitor)
            chosen, order, after = query.chosen(visitor.own_key_only), query.ranked, query.after
        except BadRequest as error:
            fault, query = error.message, RequestsQuery()
            chosen, order, after = query.chosen(visitor.own_key_only), query.ranked, None
        if query.is_history:
            try:
                page = await self.requests.ended(
                    visitor.principal.id, chosen, ENDED_ROWS, order, after
                )
                durations = await self.regions.stored_histogram(visitor.principal.id, chosen, query)
            except ServiceUnavailable as error:
                return self.renderer.fault(visitor, error)
            rows = await self.regions.history_rows(page.views)
        else:
            page = None
            rows = await self.regions.rows(chosen)
            durations = self.regions.histogram(chosen, path_of(query))
        following = None if page is None or page.next is None else query.next_page(page.next)

        models = [one.name for one in self.catalogue.models if visitor.principal.allows(one.name)]

        def render() -> Response:
            return self.renderer.page(
                visitor,
                "requests.html",
                fault=fault,
                filter=query,
                nothing=RequestsQuery(),
                refresh="" if query.is_history else f"{API}/requests?{request.url.query}",
                chips=chips_of(query, models, None if visitor.own_key_only else rows.names),
                sorts=[path_of(query, order=one) for one in (Order.LATEST, Order.SLOWEST)],
                cancel=_cancel_path(visitor),
                rows=rows,
                durations=durations,
                complete=page is None or page.complete,
                following=following,
            )

        return await self.renderer.in_thread(render)

    async def refresh_requests(
        self, request: Request, query: Annotated[RequestsQuery, Query()]
    ) -> Mapping[str, str]:
        """The regions of the page as they are now."""
        visitor = _checked(visitor_of(request))
        query = await self._by_id(query, visitor)
        chosen = query.chosen(visitor.own_key_only)
        return await self.regions.html(chosen, _cancel_path(visitor), path_of(query))

    async def _by_id(self, query: RequestsQuery, visitor: Visitor) -> RequestsQuery:
        """Return a query whose key is an ID, not a name. Raises BadRequest."""
        if not query.key or visitor.own_key_only:
            return query
        try:
            return query.model_copy(update={"key": await self.names.id_of(query.key)})
        except UnknownKey as error:
            raise BadRequest(str(error)) from None

    async def show_request(self, request: Request, id: str) -> Response:
        visitor = visitor_of(request)
        view = await self.requests.find(id, visitor.own_key_only)
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
        own = visitor.own_key_only
        # A client may do this with its own requests only, and as often as it sends them.
        if own is None and self.requests.is_in_flight(id):
            await self.audit.record(
                AuditRecord(
                    actor=Actor(visitor.principal.id, visitor.role, client_address(request.scope)),
                    action=Action.REQUEST_CANCEL,
                    target=id,
                )
            )
        view: RequestView | None = self.requests.cancel(id, visitor.principal.id, own)
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
