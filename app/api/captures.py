"""/admin/captures and /admin/requests/{id}/capture: requests and answers that were captured."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgspec
from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from app.api.admin_auth import CallingActor, RequireRight, Right, admin_router
from app.api.admin_requests import RequestId, parse_moment
from app.api.error_responses import ADMIN, error_responses
from app.api.usage import OwnCapture
from app.auth import Authenticator, KeyStore, Principal, written
from app.capture import Capture, CaptureFilter, CaptureReader, CaptureRules
from app.errors import BadRequest, RouteNotFound

# A capture has up to 4 MiB.
PAGE = 10
MAX_PAGE = 50
_CURSOR = re.compile(r"[0-9a-f]{24}")
NOT_FOUND = "this request was not captured, or its capture is no longer kept"
ALL = "name key, model, from or to, or all=true"

KeyQuery = Annotated[str | None, Query(description="Only of this key, by its ID or its name.")]
ModelQuery = Annotated[
    str | None, Query(max_length=256, description="Only of this model, which answered.")
]
SinceQuery = Annotated[
    str | None,
    Query(alias="from", description="Only at or after this time, or since this UTC day."),
]
UntilQuery = Annotated[
    str | None, Query(alias="to", description="Only before this time; a day counts as a whole.")
]


class CaptureRow(BaseModel):
    """The capture of one request."""

    id: str = Field(description="The field `id` of the request.")
    expires_at: str = Field(description="When it is deleted.")
    capture: dict[str, Any] | None = Field(
        description="The request and its answer; null: it cannot be decrypted."
    )
    fault: str | None = Field(description="Why it cannot be decrypted.")

    @classmethod
    def of(cls, found: Capture) -> Self:
        """Return the row of a capture."""
        document = None if found.document is None else msgspec.json.decode(found.document)
        return cls(
            id=found.id,
            expires_at=written(found.expires_ms) or "",
            capture=document,
            fault=found.fault or None,
        )


class CaptureList(BaseModel):
    object: str = "list"
    data: list[CaptureRow] = Field(description="In the order of their IDs.")
    next: str | None = Field(description="The cursor of the next page; null: this is the last.")


class Deleted(BaseModel):
    deleted: int = Field(description="Number of captures.")


@dataclass(frozen=True, slots=True)
class _Captures:
    """The handlers of the routes."""

    reader: CaptureReader
    keys: KeyStore

    async def show_capture(self, id: RequestId, actor: CallingActor) -> CaptureRow:
        """What a request and its answer said. Reading it is a record of the audit."""
        found = await self.reader.read(id, actor)
        if found is None:
            raise RouteNotFound(NOT_FOUND)
        return CaptureRow.of(found)

    async def list_captures(
        self,
        actor: CallingActor,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = PAGE,
        key: KeyQuery = None,
        model: ModelQuery = None,
        since: SinceQuery = None,
        until: UntilQuery = None,
        cursor: Annotated[
            str | None, Query(description="`next` of the previous page, with the same filters.")
        ] = None,
    ) -> CaptureList:
        """Captures with what they say, for an export. Each is a record of the audit."""
        if cursor is not None and _CURSOR.fullmatch(cursor) is None:
            raise BadRequest("cursor must be `next` of another page")
        chosen = await self._filter(key, model, since, until)
        page = await self.reader.page(chosen, limit, actor, cursor)
        return CaptureList(data=[CaptureRow.of(one) for one in page.captures], next=page.next)

    async def delete_captures(
        self,
        actor: CallingActor,
        key: KeyQuery = None,
        model: ModelQuery = None,
        since: SinceQuery = None,
        until: UntilQuery = None,
        all: Annotated[bool, Query(description="Delete every capture.")] = False,
    ) -> Deleted:
        """Delete captures before the end of their retention. It is a record of the audit."""
        chosen = await self._filter(key, model, since, until)
        if (chosen == CaptureFilter()) is not all:
            raise BadRequest(ALL)
        return Deleted(deleted=await self.reader.delete(chosen, actor))

    async def _filter(
        self, key: str | None, model: str | None, since: str | None, until: str | None
    ) -> CaptureFilter:
        """Return the filter of a query. Raises BadRequest, and RouteNotFound for no such key."""
        return CaptureFilter(
            key_id=None if key is None else await self.keys.id_for_reports(key),
            model=model,
            since_s=None if since is None else parse_moment("from", since).timestamp(),
            until_s=None
            if until is None
            else parse_moment("to", until, end_of_day=True).timestamp(),
        )


def own_capture(rules: CaptureRules | None, caller: Principal) -> OwnCapture | None:
    """Return what is captured of a caller's requests; None: nothing."""
    if rules is None or not (models := rules.models_of(caller)):
        return None
    settings = rules.settings
    return OwnCapture(
        models=models,
        share=settings.share,
        retention_days=settings.retention_days,
        redact=list(settings.redact),
    )


def captures_routers(
    reader: CaptureReader, keys: KeyStore, authenticator: Authenticator
) -> tuple[APIRouter, APIRouter]:
    """Return the routes of /admin/captures, and of the capture of one request."""
    handlers = _Captures(reader, keys)
    reading = [Depends(RequireRight(authenticator, Right.CAPTURES_READ))]
    writing = [Depends(RequireRight(authenticator, Right.CAPTURES_WRITE))]
    errors = error_responses(*ADMIN, RouteNotFound)
    captures, requests = admin_router("captures", "captures"), admin_router("requests", "requests")
    captures.get("", dependencies=reading, responses=errors)(handlers.list_captures)
    captures.delete("", dependencies=writing, responses=errors)(handlers.delete_captures)
    requests.get("/{id}/capture", dependencies=reading, responses=errors)(handlers.show_capture)
    return captures, requests
