"""Requests: those in flight, those that ended, and what the time of one was spent on.

A client sees and cancels the requests of its own key, an operator those of its models, the manager
of an owner sees those of its keys, and other roles see all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.api import ActLimiter, Right, client_address
from app.audit import Action, Actor, AuditRecord, AuditTrail
from app.auth import Role, UnknownKey
from app.console.capture_page import CapturePages
from app.console.guard import API
from app.console.key_names import KeyNames
from app.console.language import noop
from app.console.rendering import Renderer
from app.console.request_bar import request_bar
from app.console.request_chips import chips_of, path_of
from app.console.request_regions import ENDED_ROWS, FIRST_ROWS, RequestRegions
from app.console.requests_query import RequestsQuery
from app.console.router import visitor_of
from app.console.visitor import CONSOLE, Visitor
from app.errors import BadRequest, PermissionDenied, RouteNotFound, ServiceUnavailable
from app.relay import RequestDirectory, RequestView
from app.routing import Catalogue
from app.telemetry.logs import scrub
from app.usage import Order, RequestFilter

# Rates of shorter answers are noise: their tokens came at once.
_RATE_AFTER_S = 0.1
NOT_FOUND = noop("There is no such request here, or it is no longer kept.")


@dataclass(frozen=True, slots=True)
class RequestPages:
    """The pages of requests."""

    renderer: Renderer
    requests: RequestDirectory
    catalogue: Catalogue
    names: KeyNames
    regions: RequestRegions
    audit: AuditTrail
    captures: CapturePages
    acts: ActLimiter

    async def show_requests(
        self, request: Request, query: Annotated[RequestsQuery, Query()]
    ) -> Response:
        visitor, fault = visitor_of(request), ""
        try:
            query, chosen = await self._chosen(query, visitor)
            order, after = query.ranked, query.after
        except BadRequest as error:
            fault, query = error.message, RequestsQuery()
            chosen, order, after = query.chosen(visitor.requests), query.ranked, None
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
            rows = await self.regions.rows(chosen, FIRST_ROWS)
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
                more=len(rows.ended) == FIRST_ROWS,
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
        query, chosen = await self._chosen(query, visitor)
        return await self.regions.html(chosen, _cancel_path(visitor), path_of(query))

    async def _chosen(
        self, query: RequestsQuery, visitor: Visitor
    ) -> tuple[RequestsQuery, RequestFilter]:
        """Return a query whose key is an ID, not a name, and what it chooses. Raises BadRequest.

        To an operator of some models a name stays as it is: its ID would say that the key exists.
        """
        if not query.key or visitor.own_key_only:
            return query, query.chosen(visitor.requests)
        try:
            key_id = await self.names.id_of(query.key, visitor.scope)
        except UnknownKey as error:
            raise BadRequest(str(error)) from None
        by_id = query.model_copy(update={"key": key_id})
        chosen = by_id.chosen(visitor.requests)
        return query if visitor.scope.models is not None else by_id, chosen

    async def show_request(self, request: Request, id: str) -> Response:
        visitor = visitor_of(request)
        view = await self.requests.find(id, visitor.requests)
        if view is None:
            return self.renderer.fault(visitor, RouteNotFound(NOT_FOUND))
        shown = await self.names.find({view.record.key_id})
        return self.renderer.page(
            visitor,
            "request.html",
            view=view,
            fault=None if view.record.fault is None else scrub(view.record.fault),
            bar=request_bar(view.phases, view.record.total_s),
            rate=_decode_rate(view),
            names=shown,
            cancel=_cancel_path(visitor),
            captured=await self.captures.has_capture(visitor, id),
        )

    async def cancel_request(self, request: Request, id: str) -> dict[str, str]:
        """Cancel a request of the visitor's own key, or one that an operator sees."""
        visitor = _checked(visitor_of(request))
        if not _cancel_path(visitor):
            raise PermissionDenied(f"the role {visitor.role} may not cancel requests")
        # A client may do this with its own requests only, and as often as it sends them.
        if visitor.role is not Role.CLIENT and self.requests.is_in_flight(id, visitor.requests):
            self.acts.check(visitor.principal)
            await self.audit.record(
                AuditRecord(
                    actor=Actor(visitor.principal.id, visitor.role, client_address(request.scope)),
                    action=Action.REQUEST_CANCEL,
                    target=id,
                )
            )
        view: RequestView | None = self.requests.cancel(id, visitor.principal.id, visitor.requests)
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


def _decode_rate(view: RequestView) -> float | None:
    """Return the tokens per second after the first; None: not known, or too short to say."""
    record = view.record
    decode_s = record.total_s - (record.ttft_s or record.total_s)
    if decode_s < _RATE_AFTER_S or not view.answer_tokens:
        return None
    return (view.answer_tokens - 1) / decode_s


def _cancel_path(visitor: Visitor) -> str:
    """Return the path below which a request is canceled; empty: the visitor may not."""
    may = visitor.role is Role.CLIENT or visitor.may(Right.REQUESTS_WRITE)
    return "/requests" if may else ""
