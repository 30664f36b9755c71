"""/admin/audit: who did what to keys, owners, models, the configuration and sessions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from app.api.admin_auth import RequireRight, Right, admin_router
from app.api.admin_requests import parse_moment
from app.api.error_responses import ADMIN, error_responses
from app.audit import AuditFilter, AuditTrail, StoredRecord
from app.auth import Authenticator, Name, written
from app.errors import BadRequest

PAGE = 100
MAX_PAGE = 1000
_CURSOR = re.compile(r"[0-9a-f]{24}")


class AuditRow(BaseModel):
    """One act."""

    id: str
    at: str
    who: str = Field(
        description="The ID of a key; root, the key of the configuration; user@host, of a command; "
        "or SIGHUP."
    )
    who_name: str | None = Field(description="The name that the key had.")
    role: str | None = Field(description="Of the key.")
    address: str | None = Field(description="Of the client; null: on the machine itself.")
    action: str
    target: str = Field(
        description="The ID of a key or a request, or the name of an owner, a model or an engine."
    )
    target_name: str | None = Field(description="The name that the key has now.")
    before: Mapping[str, Any] | None = Field(description="What differs, as it was.")
    after: Mapping[str, Any] | None = Field(description="What differs, as it became.")

    @classmethod
    def of(cls, stored: StoredRecord) -> Self:
        """Return the row of a record."""
        record = stored.record
        return cls(
            id=stored.id,
            at=written(stored.at_ms) or "",
            who=record.actor.id,
            who_name=stored.who_name,
            role=record.actor.role,
            address=record.actor.address,
            action=record.action,
            target=record.target,
            target_name=stored.target_name,
            before=record.before,
            after=record.after,
        )


class AuditList(BaseModel):
    object: str = "list"
    data: list[AuditRow] = Field(description="The latest first.")
    next: str | None = Field(description="The cursor of the next page; null: this is the last.")


@dataclass(frozen=True, slots=True)
class _Audit:
    """The handler of the route."""

    audit: AuditTrail

    async def list_records(
        self,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = PAGE,
        who: Annotated[
            Name | None, Query(description="Only by this key, by its ID or its name, or user@host.")
        ] = None,
        action: Annotated[
            Name | None,
            Query(description="Only this action, such as key.rotate, or all of a kind: key."),
        ] = None,
        target: Annotated[
            Name | None,
            Query(description="Only to this key, by its ID or its name, or this owner or model."),
        ] = None,
        since: Annotated[
            str | None,
            Query(alias="from", description="Only at or after this time, or since this UTC day."),
        ] = None,
        until: Annotated[
            str | None, Query(alias="to", description="Only before; a day counts as a whole.")
        ] = None,
        cursor: Annotated[
            str | None, Query(description="`next` of the previous page, with the same filters.")
        ] = None,
    ) -> AuditList:
        """Who did what, from where, and what differs since; kept for audit.retention_days."""
        chosen = audit_filter(who, action, target, since, until)
        page = await self.audit.page(chosen, limit, parse_audit_cursor(cursor))
        return AuditList(data=[AuditRow.of(one) for one in page.records], next=page.next)


def audit_filter(
    who: str | None,
    action: str | None,
    target: str | None,
    since: str | None,
    until: str | None,
) -> AuditFilter:
    """Return the filter of a query. Raises BadRequest."""
    begin = None if since is None else parse_moment("from", since).timestamp()
    end = None if until is None else parse_moment("to", until, end_of_day=True).timestamp()
    if begin is not None and end is not None and begin >= end:
        raise BadRequest("from must be before to")
    return AuditFilter(who=who, action=action, target=target, since_s=begin, until_s=end)


def parse_audit_cursor(text: str | None) -> str | None:
    """Return the cursor of a page. Raises BadRequest."""
    if text is not None and _CURSOR.fullmatch(text) is None:
        raise BadRequest("cursor must be `next` of another page")
    return text


def audit_router(audit: AuditTrail, authenticator: Authenticator) -> APIRouter:
    """Return the route of /admin/audit."""
    router = admin_router("audit", "audit")
    reading = [Depends(RequireRight(authenticator, Right.AUDIT_READ))]
    router.get("", dependencies=reading, responses=error_responses(*ADMIN))(
        _Audit(audit).list_records
    )
    return router
