"""/admin/engines: the engines, their state, their logs, and restarts."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from app.api.admin_auth import (
    Caller,
    RequireRight,
    Right,
    actor_of,
    admin_router,
    caller_of,
    check_admin,
)
from app.api.error_responses import ADMIN, error_responses
from app.api.log_stream import Followers, FollowLog, readable, text_of
from app.api.middleware import notes_of
from app.audit import Action, AuditRecord, AuditTrail
from app.auth import Authenticator
from app.errors import Conflict, EngineUnavailable, RouteNotFound
from app.fleet import EngineRow, ModelOperations, UnusedServer, engine_rows
from app.routing import Catalogue
from engines.output import redact_line

LINES = 200
MAX_LINES = 10_000

Wait = Annotated[bool, Query(description="Respond when it is done, not with 202 at once.")]


class Engines(BaseModel):
    object: str = "list"
    data: list[EngineRow]
    gateways: int | None = Field(
        description="Number of gateways that share the load of these engines, this one included; "
        "null: load is not shared, or not now, because Redis is unavailable."
    )
    unused: list[UnusedServer] = Field(
        description="Discovered servers that are listed and get no requests."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engines:
    """The handlers of the routes."""

    catalogue: Catalogue
    operations: ModelOperations
    authenticator: Authenticator
    audit: AuditTrail
    draining: Callable[[], bool]
    gateways: Callable[[], int | None]
    unused: Callable[[], list[UnusedServer]]
    followers: Followers = field(default_factory=Followers)

    async def list_engines(self, caller: Caller) -> Engines:
        """Every engine, in the configuration's order; an operator's are those of its models."""
        sees = caller.scope.has_model
        return Engines(
            data=engine_rows(self.catalogue, sees),
            gateways=self.gateways(),
            unused=[one for one in self.unused() if sees(one.model)],
        )

    async def show_engine(self, name: str, caller: Caller) -> EngineRow:
        """One engine."""
        return EngineRow.of(*self.catalogue.find_replica(name, caller.scope.has_model))

    async def engine_log(
        self,
        request: Request,
        name: str,
        lines: Annotated[int, Query(ge=0, le=MAX_LINES, description="Maximum number.")] = LINES,
        follow: Annotated[bool, Query(description="Go on with new lines.")] = False,
    ) -> Response:
        """The newest lines of an engine's output, without control characters and secrets."""
        self.catalogue.find_replica(name, caller_of(request).scope.has_model)
        reader = self.operations.open_log(name)
        if follow:
            check = partial(check_admin, request.scope, self.authenticator)
            return FollowLog(reader, lines, redact_line, self.followers, self.draining, check)

        def read() -> bytes:
            # A progress bar has no end of its line while it moves.
            found = [*reader.read_last(lines), *reader.unfinished()]
            return text_of([redact_line(line) for line in found[max(len(found) - lines, 0) :]])

        with readable():
            body = await asyncio.to_thread(read)
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return PlainTextResponse(body, headers=headers)

    async def restart_engine(
        self, name: str, request: Request, response: Response, wait: Wait = False
    ) -> EngineRow:
        """Stop an engine and start it again. Its streams go on elsewhere or after the restart.

        Streams that cannot be continued and other requests in flight are aborted.
        """
        model, replica = self.catalogue.find_replica(name, caller_of(request).scope.has_model)
        notes = notes_of(request.scope)
        notes.model, notes.engine = model.name, replica.engine.name
        await self.audit.record(
            AuditRecord(actor=actor_of(request), action=Action.ENGINE_RESTART, target=name)
        )
        done = self.operations.start(name, "restart", lambda: self.operations.restart(name))
        if wait:
            await asyncio.shield(done)
        else:
            response.status_code = 202
        return EngineRow.of(model, replica)


def engines_router(
    catalogue: Catalogue,
    operations: ModelOperations,
    authenticator: Authenticator,
    audit: AuditTrail,
    draining: Callable[[], bool],
    gateways: Callable[[], int | None],
    unused: Callable[[], list[UnusedServer]],
) -> APIRouter:
    """Return the routes of /admin/engines; responses that follow a log end when `draining`.

    `gateways` returns the number of gateways that share engines; None: load is not shared now.
    `unused` returns the discovered servers that get no requests.
    """
    engines = _Engines(
        catalogue=catalogue,
        operations=operations,
        authenticator=authenticator,
        audit=audit,
        draining=draining,
        gateways=gateways,
        unused=unused,
    )
    router = admin_router("engines", "engines")
    reading = [Depends(RequireRight(authenticator, Right.ENGINES_READ, scoped=True))]
    writing = [Depends(RequireRight(authenticator, Right.ENGINES_WRITE, scoped=True))]
    known = error_responses(*ADMIN, RouteNotFound)
    router.get("", dependencies=reading, responses=error_responses(*ADMIN))(engines.list_engines)
    router.get("/{name}", dependencies=reading, responses=known)(engines.show_engine)
    router.get(
        "/{name}/log",
        dependencies=reading,
        response_class=PlainTextResponse,
        responses=error_responses(*ADMIN, RouteNotFound, Conflict),
    )(engines.engine_log)
    router.post(
        "/{name}/restart",
        dependencies=writing,
        responses={
            **error_responses(*ADMIN, RouteNotFound, Conflict, EngineUnavailable),
            202: {"model": EngineRow, "description": "Started."},
        },
    )(engines.restart_engine)
    return router
