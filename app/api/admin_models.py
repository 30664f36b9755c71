"""/admin/models: the models and their state; load, unload, put to sleep, wake."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel

from app.api.admin_auth import Caller, RequireRight, Right, actor_of, admin_router, caller_of
from app.api.admin_engines import Wait
from app.api.error_responses import ADMIN, Responses, error_responses
from app.api.middleware import notes_of
from app.audit import Action, AuditRecord, AuditTrail
from app.auth import Authenticator
from app.errors import Conflict, EngineUnavailable, ModelNotFound, RouteNotFound
from app.fleet import Activity, ModelOperations, ModelRow
from app.relay import RelayServices
from app.residency import Residency
from app.routing import Model

ModelAction = Callable[[str], Awaitable[None]]


class Models(BaseModel):
    object: str = "list"
    data: list[ModelRow]


# What the loader does to a model, by the name of the same operation of an operator.
_LOADER_OPERATIONS = {Residency.LOADING: "load", Residency.UNLOADING: "unload"}


def activity(model: Model, services: RelayServices, operations: ModelOperations) -> Activity:
    """Return a model's requests, the operation under way, and how far its load is."""
    name, loader = model.name, services.loader
    if model.owns_engines:
        in_flight, waiting = services.admission.counts(name)
    else:  # its requests are in another model's queue
        names = (name, *model.aliases)
        engines = [
            request.engine
            for request in services.in_flight
            if request.model == name or (model.split and request.requested_model in names)
        ]
        waiting = engines.count(None)
        in_flight = len(engines) - waiting
    waiting += services.starts.waiting(name)
    under_way = operations.under_way(model.base)
    if (snapshot := loader.snapshot(model.base)) is not None:
        if model.parent is None:
            waiting += snapshot.waiting
        under_way = under_way or _LOADER_OPERATIONS.get(snapshot.residency)
        loading_s = loader.loading_s(model.base)
    else:
        starts = (replica.engine.starting for replica in model.replicas)
        elapsed = (start.elapsed_s for start in starts if start is not None)
        loading_s = None if model.ready else max(elapsed, default=None)
    expected_s = None
    if loading_s is not None and (forecast := services.forecasts.of(model)) is not None:
        expected_s = forecast.in_s
    return Activity(in_flight, waiting, under_way, loading_s, expected_s)


def model_row(model: Model, services: RelayServices, operations: ModelOperations) -> ModelRow:
    """Return the row of a model."""
    return ModelRow.of(model, activity(model, services, operations))


def model_rows(services: RelayServices, operations: ModelOperations) -> list[ModelRow]:
    """Return the row of every model, in the configuration's order."""
    return [model_row(model, services, operations) for model in services.catalogue.models]


@dataclass(frozen=True, slots=True)
class _Models:
    """The handlers of the routes."""

    services: RelayServices
    operations: ModelOperations
    audit: AuditTrail
    load: ModelAction
    unload: ModelAction

    async def _run(
        self,
        action: Action,
        verb: str,
        act: ModelAction,
        name: str,
        request: Request,
        response: Response,
        wait: bool,
        **details: object,
    ) -> ModelRow:
        model = self.services.catalogue.resolve(name, caller_of(request).scope.has_model)
        notes_of(request.scope).model = model.name
        await self.audit.record(
            AuditRecord.of_change(actor_of(request), action, model.name, None, None, **details)
        )
        done = self.operations.start(model.name, verb, partial(act, model.name))
        if wait:
            await asyncio.shield(done)
        else:
            response.status_code = 202
        return model_row(model, self.services, self.operations)

    async def list_models(self, caller: Caller) -> Models:
        """Every model, in the configuration's order; of an operator its own."""
        rows = model_rows(self.services, self.operations)
        return Models(data=[row for row in rows if caller.scope.has_model(row.name)])

    async def load_model(
        self, name: str, request: Request, response: Response, wait: Wait = False
    ) -> ModelRow:
        """Start the engines of a model that are not ready; those that failed are tried again."""
        return await self._run(Action.MODEL_LOAD, "load", self.load, name, request, response, wait)

    async def unload_model(
        self, name: str, request: Request, response: Response, wait: Wait = False
    ) -> ModelRow:
        """Stop the engines of a model when their requests have ended, and free their memory."""
        return await self._run(
            Action.MODEL_UNLOAD, "unload", self.unload, name, request, response, wait
        )

    async def sleep_model(
        self,
        name: str,
        request: Request,
        response: Response,
        level: Annotated[
            int, Query(ge=1, le=2, description="1 keeps the weights in CPU memory, 2 drops them.")
        ] = 1,
        wait: Wait = False,
    ) -> ModelRow:
        """Put the engines of a model into vLLM's sleep mode, where the platform has it."""
        sleep = partial(self.operations.sleep, level=level)
        return await self._run(
            Action.MODEL_SLEEP, "sleep", sleep, name, request, response, wait, level=level
        )

    async def wake_model(
        self, name: str, request: Request, response: Response, wait: Wait = False
    ) -> ModelRow:
        """Wake the engines of a model; start those that are not asleep."""
        return await self._run(Action.MODEL_WAKE, "load", self.load, name, request, response, wait)


def admin_models_router(
    services: RelayServices,
    operations: ModelOperations,
    authenticator: Authenticator,
    audit: AuditTrail,
    load: ModelAction,
    unload: ModelAction,
) -> APIRouter:
    """Return the routes of /admin/models; `load` and `unload` act on a model by its own name."""
    router = admin_router("models", "models")
    models = _Models(services, operations, audit, load, unload)
    reading = [Depends(RequireRight(authenticator, Right.ENGINES_READ, scoped=True))]
    writing = [Depends(RequireRight(authenticator, Right.ENGINES_WRITE, scoped=True))]
    responses: Responses = {
        **error_responses(*ADMIN, ModelNotFound, RouteNotFound, Conflict, EngineUnavailable),
        202: {"model": ModelRow, "description": "Started."},
    }
    router.get("", dependencies=reading, responses=error_responses(*ADMIN))(models.list_models)
    # A name may hold slashes, as Hugging Face's do.
    for verb, act in (
        ("load", models.load_model),
        ("unload", models.unload_model),
        ("sleep", models.sleep_model),
        ("wake", models.wake_model),
    ):
        router.post(f"/{{name:path}}/{verb}", dependencies=writing, responses=responses)(act)
    return router
