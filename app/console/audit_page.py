"""The page of the audit: who did what, from where, and what differs since."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api import Right, parse_audit_cursor
from app.audit import Action, AuditFilter, AuditPage, AuditTrail, StoredRecord
from app.console.chips import Chip, Filters
from app.console.differences import Difference, differences
from app.console.language import gettext, noop
from app.console.page_routes import page_router, require
from app.console.rendering import Renderer
from app.console.requests_query import MAX_CHARS, parse_time
from app.console.visitor import CONSOLE
from app.errors import BadRequest

AUDIT = f"{CONSOLE}/audit"
ROWS = 50
_SPANS = {
    "24h": noop("Last 24 hours"),
    "7d": noop("Last 7 days"),
    "30d": noop("Last 30 days"),
}
_KINDS = {
    "key": noop("Keys"),
    "owner": noop("Owners"),
    "model": noop("Models"),
    "engine": noop("Engines"),
    "request": noop("Requests"),
    "capture": noop("Captures"),
    "configuration": noop("Configuration"),
    "logs": noop("Log levels"),
    "session": noop("Sessions"),
}


class AuditQuery(BaseModel):
    """The filters as they were typed; empty: not given."""

    model_config = ConfigDict(str_max_length=MAX_CHARS, str_strip_whitespace=True)

    who: str = ""
    action: str = ""
    target: str = ""
    since: str = Field("", alias="from")
    until: str = Field("", alias="to")
    cursor: str = ""

    @property
    def fields(self) -> dict[str, str]:
        """The filters that are given, as the address has them, without the cursor."""
        return self.model_dump(by_alias=True, exclude={"cursor"}, exclude_defaults=True)

    @property
    def filters(self) -> Filters:
        return Filters(AUDIT, self.fields)

    def chosen(self) -> AuditFilter:
        """Return which records are shown. Raises BadRequest."""
        for name, text in self.fields.items():
            if not text.isprintable():
                raise BadRequest(f"{name} has a character that cannot be printed")
        since = parse_time("from", self.since).timestamp() if self.since else None
        until = parse_time("to", self.until, end_of_day=True).timestamp() if self.until else None
        if since is not None and until is not None and since >= until:
            raise BadRequest("from must be before to")
        return AuditFilter(
            who=self.who or None,
            action=self.action or None,
            target=self.target or None,
            since_s=since,
            until_s=until,
        )

    def chips(self) -> list[Chip]:
        """Return a chip for each filter."""
        filters = self.filters
        kinds = {kind: gettext(title) for kind, title in _KINDS.items()}
        actions = kinds | {one: one.replace(".", " ").replace("_", " ") for one in Action}
        name = gettext("Name or ID")
        return [
            filters.chip(gettext("Who"), "who", {}, label=name, example="root"),
            filters.chip(gettext("Action"), "action", actions),
            filters.chip(gettext("Target"), "target", {}, label=name, example=gettext("Web shop")),
            filters.time_chip({word: gettext(title) for word, title in _SPANS.items()}),
        ]


@dataclass(frozen=True, slots=True)
class Row:
    """A record as the page shows it, with the paths that filter by its parts."""

    stored: StoredRecord
    differences: list[Difference]
    by_who: str
    by_target: str

    @classmethod
    def of(cls, stored: StoredRecord, filters: Filters) -> "Row":
        """Return the row of a record."""
        record = stored.record
        return cls(
            stored,
            differences(record.before, record.after),
            filters.path(who=record.actor.id),
            filters.path(target=record.target),
        )


@dataclass(frozen=True, slots=True)
class AuditPages:
    """The page of the audit."""

    renderer: Renderer
    audit: AuditTrail

    async def show_audit(self, request: Request, query: Annotated[AuditQuery, Query()]) -> Response:
        """Records of all gateways of the database, the latest first."""
        visitor, fault = require(request, Right.AUDIT_READ), ""
        try:
            chosen, after = query.chosen(), parse_audit_cursor(query.cursor or None)
        except BadRequest as error:
            fault, query, chosen, after = error.message, AuditQuery(), AuditFilter(), None
        page = await self.audit.page(chosen, ROWS, after)
        shown = self._context(query, page)
        render = partial(self.renderer.page, visitor, "audit.html", fault=fault, **shown)
        return await self.renderer.in_thread(render)

    def _context(self, query: AuditQuery, page: AuditPage) -> dict[str, Any]:
        following = None if page.next is None else {**query.fields, "cursor": page.next}
        return {
            "chips": query.chips(),
            "filtered": bool(query.fields),
            "first": query.filters.path() if query.cursor else None,
            "rows": [Row.of(one, query.filters) for one in page.records],
            "following": None if following is None else f"{AUDIT}?{urlencode(following)}",
        }

    def router(self) -> APIRouter:
        """Return the route of the page."""
        router = page_router(self.renderer)
        router.get("/audit")(self.show_audit)
        return router
