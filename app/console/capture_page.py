"""The page of a capture: to administrators, and to the key whose request it was."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from app.api import Right, client_address, has_right
from app.audit import Actor
from app.auth import Role
from app.capture import Capture, CaptureReader, Document
from app.console.language import gettext, noop
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.visitor import CONSOLE, Visitor
from app.database import DatabaseError
from app.errors import PermissionDenied, RouteNotFound

NOT_FOUND = noop("This request was not captured, or its capture is no longer kept.")


class Part(msgspec.Struct, frozen=True):
    """The request or the answer, as it is shown."""

    title: str
    size: int
    truncated: bool
    stream: bool
    text: str


@dataclass(frozen=True, slots=True)
class CapturePages:
    """The page, and which requests have one."""

    renderer: Renderer
    reader: CaptureReader

    async def has_capture(self, visitor: Visitor, id_: str) -> bool:
        """Return whether the visitor may read a capture of a request, and there is one."""
        if not may_read(visitor):
            return False
        try:
            return await self.reader.exists(id_, visitor.own_key_only)
        except DatabaseError:
            return False

    async def show_capture(self, request: Request, id: str) -> Response:
        visitor = visitor_of(request)
        if not may_read(visitor):
            fault = gettext("The role %(role)s does not see captures.", role=visitor.role)
            return self.renderer.fault(visitor, PermissionDenied(fault))
        actor = Actor(visitor.principal.id, visitor.role, client_address(request.scope))
        found = await self.reader.read(id, actor, visitor.own_key_only)
        if found is None:
            return self.renderer.fault(visitor, RouteNotFound(NOT_FOUND))
        render = partial(
            self.renderer.page,
            visitor,
            "capture.html",
            capture=found,
            audited=found.key_id != actor.id,
            parts=list(_parts_of(found)),
        )
        return await self.renderer.in_thread(render)

    def router(self) -> APIRouter:
        """Return the route."""
        router = APIRouter(prefix=CONSOLE, include_in_schema=False)
        router.get("/requests/{id}/capture")(self.show_capture)
        return router


def may_read(visitor: Visitor) -> bool:
    """Return whether the visitor may read captures: all, or as a client those of its own key."""
    return visitor.logged_in and (
        visitor.role is Role.CLIENT
        or has_right(visitor.principal, Right.CAPTURES_READ, scoped=False)
    )


def _parts_of(capture: Capture) -> Iterator[Part]:
    if capture.document is None:
        return
    document = msgspec.json.decode(capture.document, type=Document)
    for title, kept in (
        (gettext("Request"), document.request),
        (gettext("Answer"), document.answer),
    ):
        body = kept.body
        text = body if isinstance(body, str) else _formatted(body)
        yield Part(title, kept.bytes, kept.truncated, kept.stream, text)


def _formatted(body: object) -> str:
    if body is None:
        return ""
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode()
