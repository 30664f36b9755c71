"""/admin/requests: the requests in flight, those that ended last, and why one took so long."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal, Self

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, Field

from app.api.admin_auth import Caller, RequireRight, Right, admin_router
from app.api.error_responses import ADMIN, error_responses
from app.api.middleware import notes_of
from app.auth import Authenticator, KeyStore
from app.errors import BadRequest, RouteNotFound
from app.relay import IN_FLIGHT, RequestDirectory, RequestFilter, RequestView
from app.telemetry import UNKNOWN_MODEL, Step
from app.telemetry.logs import scrub

PAGE = 100
MAX_PAGE = 1000
# A page looks at every request that is kept: 4,096 take about 3 ms.
_STATUS = re.compile(r"([1-5])(?:xx|([0-9]{2}))")
NOT_FOUND = "there is no such request, or it ended too long ago"
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
    phase: str | None = Field(description="Of a request in flight; null also without the console.")
    arrived_at: str
    elapsed_s: float = Field(description="From its arrival to its last byte, or until now.")
    key_id: str
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
    def of(cls, view: RequestView) -> Self:
        record, usage = view.record, view.record.usage
        phases = view.phases if view.outcome == IN_FLIGHT else []
        return cls(
            id=view.id,
            request_id=record.request_id,
            outcome=view.outcome,
            phase=phases[-1].name if phases else None,
            arrived_at=_rfc3339(view.arrived_at),
            elapsed_s=round(record.total_s, 6),
            key_id=record.key_id,
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
    ended: list[RequestRow] = Field(description="The latest first.")


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

    phases: list[PhaseRow] = Field(description="Empty while the console is disabled.")
    attempts: list[AttemptRow]
    recomputed_tokens: int = Field(description="Computed again to go on at another engine.")
    not_continued: str | None = Field(description="Why an interrupted stream did not go on.")

    @classmethod
    def of(cls, view: RequestView) -> Self:
        timeline, record = view.timeline, view.record
        return cls(
            **RequestRow.of(view).model_dump(),
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

    async def list_requests(
        self,
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
    ) -> RequestList:
        """The requests in flight, and those that ended last: up to 4,096 since the start.

        Requests without a valid key are left out. With the console disabled, none that ended is
        known.
        """
        chosen = RequestFilter(
            key_id=None if key is None else await self.keys.id_for_reports(key),
            model=model,
            request_id=request_id,
            outcome=outcome,
            statuses=None if status is None else status_range(status),
        )
        return RequestList(
            in_flight=[RequestRow.of(one) for one in self.requests.in_flight(chosen, limit)],
            ended=[RequestRow.of(one) for one in self.requests.ended(chosen, limit)],
        )

    async def show_request(self, id: RequestId) -> RequestDetail:
        """One request in flight or ended, with its phases and its attempts at engines."""
        view = self.requests.find(id)
        if view is None:
            raise RouteNotFound(NOT_FOUND)
        return RequestDetail.of(view)

    async def cancel_request(
        self,
        request: Request,
        id: RequestId,
        principal: Caller,
    ) -> RequestRow:
        """Cancel a request in flight, and return it as it was.

        Its client gets the error `request_canceled` with status 403, or as an event in a stream;
        the engine stops generating. What it has generated is charged.
        """
        view = self.requests.cancel(id, principal.id)
        if view is None:
            raise RouteNotFound(NOT_IN_FLIGHT)
        notes_of(request.scope).model = view.record.model
        return RequestRow.of(view)


def requests_router(
    requests: RequestDirectory, keys: KeyStore, authenticator: Authenticator
) -> APIRouter:
    """Return the routes of /admin/requests."""
    router, handlers = admin_router("requests", "requests"), _Requests(requests, keys)
    reading = [Depends(RequireRight(authenticator, Right.REQUESTS_READ))]
    writing = [Depends(RequireRight(authenticator, Right.REQUESTS_WRITE))]
    errors = error_responses(*ADMIN, RouteNotFound)  # 404 of the list: unknown key
    router.get("", dependencies=reading, responses=errors)(handlers.list_requests)
    router.get("/{id}", dependencies=reading, responses=errors)(handlers.show_request)
    router.post("/{id}/cancel", dependencies=writing, responses=errors)(handlers.cancel_request)
    return router


def status_range(text: str) -> range:
    """Return the statuses of a class such as 4xx, or the one that is given."""
    if (match := _STATUS.fullmatch(text)) is None:
        raise BadRequest("status must be a status such as 429, or a class such as 4xx")
    if match[2] is None:
        first = int(match[1]) * 100
        return range(first, first + 100)
    return range(int(text), int(text) + 1)


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
