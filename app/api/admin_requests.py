"""/admin/requests: the requests in flight, those that have ended, and why one took so long."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal, Self

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, Field

from app.api.admin_auth import Caller, CallingActor, RequireRight, Right, admin_router
from app.api.error_responses import ADMIN, error_responses
from app.api.middleware import notes_of
from app.audit import Action, AuditRecord, AuditTrail
from app.auth import (
    UNAUTHENTICATED,
    AdminScope,
    Authenticator,
    KeyStore,
    Principal,
    Role,
    UnknownKey,
)
from app.database import DatabaseError
from app.errors import BadRequest, RouteNotFound
from app.relay import IN_FLIGHT, RequestDirectory, RequestView
from app.telemetry import UNKNOWN_MODEL, Step
from app.telemetry.logs import scrub
from app.usage import Order, Place, RequestFilter

PAGE = 100
MAX_PAGE = 1000
# Without `from`: a search without an end would read the whole ledger.
DEFAULT_SPAN = timedelta(days=7)
_STATUS = re.compile(r"([1-5])(?:xx|([0-9]{2}))")
_CURSOR = re.compile(r"([0-9]{1,18})\.([0-9a-f]{24})")
NOT_FOUND = (
    "there is no request with this id, or it is no longer kept; by its x-request-id it is found in "
    "the list (request_id)"
)
NOT_IN_FLIGHT = "there is no such request in flight"

Outcome = Literal["in_flight", "completed", "refused", "failed", "disconnected", "canceled"]
RequestId = Annotated[
    str, Path(max_length=32, description="The field `id` of a request, not its x-request-id.")
]


class RequestRow(BaseModel):
    """One request. Nothing of its prompt or its answer is kept."""

    id: str = Field(description="Made by the gateway: several requests may have one request_id.")
    request_id: str = Field(description="The x-request-id.")
    outcome: Outcome
    phase: str | None = Field(description="Of a request in flight.")
    longest_phase: str | None = Field(description="What most of its time was spent on.")
    longest_phase_s: float | None
    arrived_at: str
    elapsed_s: float = Field(description="From its arrival to its last byte, or until now.")
    key_id: str
    key_name: str | None = Field(description="null where no key of that id is known.")
    owner: str = Field(description="Of the key; empty: none.")
    model: str | None = Field(description="null until it is known.")
    requested_model: str | None = Field(description="The name or alias that the client sent.")
    engine: str | None = Field(description="The last one that it reached.")
    endpoint: str
    status: int | None = Field(description="null before the response has begun.")
    error: str | None = Field(description="The kind of fault.")
    fault: str | None = Field(description="The fault in words.")
    queued_s: float | None = Field(description="Waited for a load and a slot; null: it did not.")
    ttft_s: float | None = Field(description="Until the first token of a stream.")
    client_wait_s: float = Field(description="Time that the response waited for its client.")
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None = Field(description="Of a stream in flight, an estimate so far.")
    continued: int = Field(description="How often its stream went on at another engine.")

    @classmethod
    def of(cls, view: RequestView, names: Mapping[str, str]) -> Self:
        """Return the row of a request; `names` are those of keys by ID."""
        record, usage = view.record, view.record.usage
        phases = view.phases
        present = phases[-1].name if phases and view.outcome == IN_FLIGHT else None
        longest = max(phases, key=lambda phase: phase.end_s - phase.start_s, default=None)
        return cls(
            id=view.id,
            request_id=record.request_id,
            outcome=view.outcome,
            phase=present,
            longest_phase=None if longest is None else longest.name,
            longest_phase_s=None if longest is None else round(longest.end_s - longest.start_s, 6),
            arrived_at=_rfc3339(view.arrived_at),
            elapsed_s=round(record.total_s, 6),
            key_id=record.key_id,
            key_name=names.get(record.key_id),
            owner=record.owner,
            model=None if record.model == UNKNOWN_MODEL else record.model,
            requested_model=record.requested_model,
            engine=record.engine,
            endpoint=record.endpoint,
            status=record.status or None,
            error=record.error,
            fault=None if record.fault is None else scrub(record.fault),
            queued_s=record.queued_s,
            ttft_s=record.ttft_s,
            client_wait_s=record.client_wait_s,
            prompt_tokens=None if usage is None else usage.prompt,
            cached_tokens=None if usage is None else usage.cached,
            completion_tokens=view.answer_tokens,
            continued=record.continued,
        )


class RequestList(BaseModel):
    object: str = "list"
    in_flight: list[RequestRow] = Field(description="The oldest first.")
    since: str = Field(
        serialization_alias="from", description="Those that ended before are left out."
    )
    until: str | None = Field(serialization_alias="to", description="null: until now.")
    ended: list[RequestRow] = Field(description="In the order that was asked for.")
    next: str | None = Field(description="The cursor of the next page; null: this is the last.")
    complete: bool = Field(
        description="false: the database did not answer in time, and the ended requests are those "
        "in the memory of this gateway. Ask for a shorter time, or see whether it is up."
    )


class PhaseRow(BaseModel):
    """A part of the time of a request, in seconds from its arrival; the parts leave no gap."""

    name: str
    start_s: float
    end_s: float
    note: str = Field(description="Engine, place in the queue at entry, fault.")


class AttemptRow(BaseModel):
    """An attempt at an engine, in seconds from the arrival of the request."""

    engine: str
    start_s: float
    answered_s: float | None = Field(description="The head of a stream; null: no stream.")
    end_s: float | None = Field(description="null: it lasted as long as the request.")
    status: int | None = Field(description="Of the engine's response.")
    fault: str | None = Field(description="The kind of fault after which the request went on.")

    @classmethod
    def of(cls, step: Step, started: float) -> Self:
        return cls(
            engine=step.engine or "",
            start_s=step.start - started,
            answered_s=None if step.answered is None else step.answered - started,
            end_s=None if step.end is None else step.end - started,
            status=step.status,
            fault=step.fault,
        )


class RequestDetail(RequestRow):
    """One request, and what its time was spent on."""

    phases: list[PhaseRow]
    attempts: list[AttemptRow]
    recomputed_tokens: int = Field(description="Computed again to go on at another engine.")
    not_continued: str | None = Field(description="Why an interrupted stream did not go on.")

    @classmethod
    def of(cls, view: RequestView, names: Mapping[str, str]) -> Self:
        timeline, record = view.timeline, view.record
        return cls(
            **RequestRow.of(view, names).model_dump(),
            phases=[
                PhaseRow(name=one.name, start_s=one.start_s, end_s=one.end_s, note=one.note)
                for one in view.phases
            ],
            attempts=[
                AttemptRow.of(step, timeline.started)
                for step in timeline.steps()
                if step.engine is not None
            ],
            recomputed_tokens=record.recomputed_tokens,
            not_continued=record.not_continued,
        )


@dataclass(frozen=True, slots=True)
class _Requests:
    """The handlers of the routes."""

    requests: RequestDirectory
    keys: KeyStore
    audit: AuditTrail

    async def list_requests(
        self,
        principal: Caller,
        limit: Annotated[
            int, Query(ge=1, le=MAX_PAGE, description="Of each of both lists.")
        ] = PAGE,
        key: Annotated[
            str | None, Query(description="Only this key, by its ID or its name.")
        ] = None,
        model: Annotated[
            str | None, Query(description="Only of this model, or of those that asked for it.")
        ] = None,
        status: Annotated[
            str | None, Query(description="Only this status, such as 429, or this class: 4xx.")
        ] = None,
        outcome: Annotated[Outcome | None, Query(description="Only with this outcome.")] = None,
        request_id: Annotated[
            str | None, Query(description="Only with this x-request-id; several may have one.")
        ] = None,
        slower_than_s: Annotated[
            float | None, Query(ge=0, description="Only those that took longer.")
        ] = None,
        since: Annotated[
            str | None,
            Query(
                alias="from",
                description="Only those that ended at or after this time, such as "
                "2026-11-26T14:00:00Z, or since this UTC day; default: 7 days before the end.",
            ),
        ] = None,
        until: Annotated[
            str | None,
            Query(alias="to", description="Only those that ended before; a day counts as a whole."),
        ] = None,
        order: Annotated[Order, Query(description="What comes first.")] = Order.LATEST,
        cursor: Annotated[
            str | None, Query(description="`next` of the previous page, with the same filters.")
        ] = None,
    ) -> RequestList:
        """The requests in flight, and those that have ended, in the order that is asked for.

        Of the ended ones, those that reached an engine, and up to 20 a second that failed before,
        are kept as long as usage records, with those of other gateways of the database; of the
        others, this gateway has the last 4,096 of its own. Requests without a valid key are left
        out. Each key has one search at a time: another is 503 after a second.
        """
        end = None if until is None else parse_moment("to", until, end_of_day=True)
        begin = (end or datetime.now(UTC)) - DEFAULT_SPAN
        if since is not None:
            begin = parse_moment("from", since)
        if end is not None and begin >= end:
            raise BadRequest("from must be before to")
        chosen = msgspec.structs.replace(
            requests_of(principal),
            key_id=None if key is None else await key_in_scope(self.keys, key, principal.scope),
            model=model,
            request_id=request_id,
            outcome=outcome,
            statuses=None if status is None else status_range(status),
            since_s=begin.timestamp(),
            until_s=None if end is None else end.timestamp(),
            slower_than_s=slower_than_s,
        )
        after = None if cursor is None else parse_cursor(cursor)
        page = await self.requests.ended(principal.id, chosen, limit, order, after)
        under_way = self.requests.in_flight(chosen, limit)
        names = await self._names((*under_way, *page.views))
        return RequestList(
            in_flight=[RequestRow.of(one, names) for one in under_way],
            since=_rfc3339(begin.timestamp()),
            until=None if end is None else _rfc3339(end.timestamp()),
            ended=[RequestRow.of(one, names) for one in page.views],
            next=None if page.next is None else cursor_of(page.next),
            complete=page.complete,
        )

    async def show_request(self, id: RequestId, principal: Caller) -> RequestDetail:
        """One request in flight or ended, with its phases and its attempts at engines."""
        view = await self.requests.find(id, requests_of(principal))
        if view is None:
            raise RouteNotFound(NOT_FOUND)
        return RequestDetail.of(view, await self._names((view,)))

    async def cancel_request(
        self,
        request: Request,
        id: RequestId,
        principal: Caller,
        actor: CallingActor,
    ) -> RequestRow:
        """Cancel a request in flight, and return it as it was.

        Its client gets the error `request_canceled` with status 403, or as an event in a stream;
        the engine stops generating. What it has generated is charged.
        """
        chosen = requests_of(principal)
        if not self.requests.is_in_flight(id, chosen):
            raise RouteNotFound(NOT_IN_FLIGHT)
        await self.audit.record(AuditRecord(actor=actor, action=Action.REQUEST_CANCEL, target=id))
        view = self.requests.cancel(id, actor.id, chosen)
        if view is None:
            raise RouteNotFound(NOT_IN_FLIGHT)
        notes_of(request.scope).model = view.record.model
        return RequestRow.of(view, await self._names((view,)))

    async def _names(self, views: Collection[RequestView]) -> Mapping[str, str]:
        """Return the names of keys by ID; none while the database does not answer."""
        try:
            return await self.keys.names({view.record.key_id for view in views})
        except DatabaseError:
            return {}


def requests_router(
    requests: RequestDirectory, keys: KeyStore, authenticator: Authenticator, audit: AuditTrail
) -> APIRouter:
    """Return the routes of /admin/requests."""
    router, handlers = admin_router("requests", "requests"), _Requests(requests, keys, audit)
    reading = [Depends(RequireRight(authenticator, Right.REQUESTS_READ, scoped=True))]
    writing = [Depends(RequireRight(authenticator, Right.REQUESTS_WRITE, scoped=True))]
    errors = error_responses(*ADMIN, RouteNotFound)  # 404 of the list: unknown key
    router.get("", dependencies=reading, responses=errors)(handlers.list_requests)
    router.get("/{id}", dependencies=reading, responses=errors)(handlers.show_request)
    router.post("/{id}/cancel", dependencies=writing, responses=errors)(handlers.cancel_request)
    return router


def requests_of(principal: Principal) -> RequestFilter:
    """Return which requests a caller sees: of its own key, in its scope, or all."""
    if principal.role is Role.CLIENT:
        return RequestFilter(key_id=principal.id)
    scope = principal.scope
    return RequestFilter(owner=scope.owner, served_by=scope.models)


async def key_in_scope(keys: KeyStore, named: str, scope: AdminScope) -> str:
    """Return the ID of a key, by its ID or its name, whose requests are to be listed.

    An operator of some models is not told which keys there are: to it an unknown key is one without
    requests. Raises UnknownKey.
    """
    try:
        return await keys.within(scope.owner).id_for_reports(named)
    except UnknownKey:
        if scope.models is None:
            raise
        return UNAUTHENTICATED.id


def status_range(text: str) -> range:
    """Return the statuses of a class such as 4xx, or the one that is given."""
    if (match := _STATUS.fullmatch(text)) is None:
        raise BadRequest("status must be a status such as 429, or a class such as 4xx")
    if match[2] is None:
        first = int(match[1]) * 100
        return range(first, first + 100)
    return range(int(text), int(text) + 1)


def parse_moment(name: str, text: str, *, end_of_day: bool = False) -> datetime:
    """Return a time of a query; a day is its beginning, or its end. Raises BadRequest."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        if end_of_day and len(text) == len("2026-11-26"):
            moment += timedelta(days=1)
        # Near the ends of the calendar neither UTC nor the time a span before has a date.
        valid = moment.astimezone(UTC).timestamp() >= 0
    except (ValueError, OverflowError):
        valid = False
    if not valid:
        raise BadRequest(
            f"{name} must be a time such as 2026-11-26T14:00:00Z or a day such as 2026-11-26"
        )
    return moment


def cursor_of(place: Place) -> str:
    """Return a place in a list as a cursor."""
    return f"{place.rank}.{place.id}"


def parse_cursor(text: str) -> Place:
    """Return the place of a cursor. Raises BadRequest."""
    if (match := _CURSOR.fullmatch(text)) is None:
        raise BadRequest("cursor must be `next` of another page")
    return Place(int(match[1]), match[2])


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
