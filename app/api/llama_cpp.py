"""GET /models, POST /models/load and POST /models/unload, as llama.cpp's server has them.

llama-server in router mode lists its models with their state and changes what is loaded; chat pages
such as Open WebUI know this API. Off unless `server.llama_cpp_models` is set. The states are those
of /admin/models; arguments, paths and reasons of failures, which llama.cpp shows, are left out.

A client's key serves here, since a chat page has only one key. It needs the permission
`may_load_models`, and reaches only the models that it may use.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field, ValidationError

from app.api.act_limits import ActLimiter
from app.api.admin_auth import MAX_BODY_BYTES, Caller, CallingActor, bound_body
from app.api.admin_models import ModelAction
from app.api.client_key import ClientKey
from app.api.error_responses import BODY, CLIENT, Responses, error_responses, rate_headers
from app.api.middleware import notes_of
from app.audit import Action, Actor, AuditRecord, AuditTrail
from app.auth import Principal
from app.errors import (
    BadRequest,
    Conflict,
    EngineUnavailable,
    InvalidJson,
    MissingModel,
    ModelNotFound,
    PermissionDenied,
    shutting_down,
)
from app.fleet import ModelOperations, ModelRow
from app.routing import Catalogue, Model
from engines.base import EngineState

# How long a response waits for the operation, so that a client that reads the state next sees its
# result: vLLM stops in a second or two. Open WebUI waits 30 s at most.
ANSWER_WITHIN_S = 3.0

Verb = Literal["load", "unload"]
_ACTIONS: dict[Verb, Action] = {"load": Action.MODEL_LOAD, "unload": Action.MODEL_UNLOAD}
Value = Literal["unloaded", "loading", "loaded", "sleeping"]

_VALUES: dict[EngineState, Value] = {
    EngineState.READY: "loaded",
    EngineState.STARTING: "loading",
    EngineState.DRAINING: "loaded",  # it still serves its last requests
    EngineState.ASLEEP: "sleeping",
    EngineState.STOPPING: "unloaded",
    EngineState.FAILED: "unloaded",
    EngineState.STOPPED: "unloaded",
}


class LlamaCppStatus(BaseModel):
    """The state of a model in llama.cpp's words."""

    value: Value
    args: list[str] = Field([], description="Always empty: engines' arguments are not shown.")
    failed: Literal[True] | None = Field(None, description="Present if its latest load failed.")


class LlamaCppModel(BaseModel):
    id: str
    object: Literal["model"] = "model"
    owned_by: str = "vllm-gateway"
    created: int
    aliases: list[str]
    status: LlamaCppStatus


class LlamaCppModels(BaseModel):
    object: Literal["list"] = "list"
    data: list[LlamaCppModel]


class Accepted(BaseModel):
    """The operation is done or under way."""

    success: Literal[True] = True


class _NamedModel(BaseModel):
    """The body of a request; other fields are ignored, as llama.cpp does."""

    model: str = Field(min_length=1, description="A model or alias of /v1/models.")


_REQUEST = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": _NamedModel.model_json_schema()}},
    }
}


def status_of(row: ModelRow) -> LlamaCppStatus:
    """Return a model's state in llama.cpp's words."""
    value = _VALUES[row.state]
    if value == "unloaded" and (row.loading is not None or row.under_way == "load"):
        return LlamaCppStatus(value="loading")
    return LlamaCppStatus(value=value, failed=True if row.state is EngineState.FAILED else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Models:
    """The handlers of the routes."""

    catalogue: Catalogue
    row_of: Callable[[Model], ModelRow]
    operations: ModelOperations
    audit: AuditTrail
    acts: ActLimiter
    load: ModelAction
    unload: ModelAction

    async def _requested(self, request: Request, principal: Principal) -> ModelRow:
        """Return the model that a body names, if the caller may load models and use this one."""
        if not principal.may_load_models:
            raise PermissionDenied(
                "this key may not load and unload models; an administrator allows it: "
                "vllm-gateway keys update KEY --may-load-models"
            )
        bounded = Request(request.scope, bound_body(request.receive, MAX_BODY_BYTES))
        model = self.catalogue.find(_model_of(await bounded.body()), principal.allows)
        notes_of(request.scope).model = model.name
        self.acts.check(principal)
        return self.row_of(model)

    async def _run(self, row: ModelRow, verb: Verb, act: ModelAction, actor: Actor) -> Accepted:
        await self.audit.record(AuditRecord(actor=actor, action=_ACTIONS[verb], target=row.name))
        operation = self.operations.start(row.name, verb, partial(act, row.name))
        await asyncio.wait((operation,), timeout=ANSWER_WITHIN_S)
        if operation.cancelled():
            raise shutting_down()
        if operation.done() and (error := operation.exception()) is not None:
            raise _without_reason(error, f"{verb} of model {row.name}")
        return Accepted()

    async def list_models(self, principal: Caller) -> LlamaCppModels:
        """Every model that the caller may use, with its state."""
        models = [model for model in self.catalogue.models if principal.allows(model.name)]
        return LlamaCppModels(data=[_described(model, self.row_of(model)) for model in models])

    async def load_model(
        self, request: Request, principal: Caller, actor: CallingActor
    ) -> Accepted:
        """Load a model. Requires `may_load_models`.

        Responds after 3 s at the latest; a longer load goes on. 400 if it is loaded already.
        """
        row = await self._requested(request, principal)
        if row.engines and row.ready == row.engines:
            raise BadRequest(f"the model {row.name} is loaded already")
        return await self._run(row, "load", self.load, actor)

    async def unload_model(
        self, request: Request, principal: Caller, actor: CallingActor
    ) -> Accepted:
        """Unload a model after its requests in flight. Requires `may_load_models`.

        Responds after 3 s at the latest; a longer unload goes on. A later request loads the model
        again. 400 if it is not loaded.
        """
        row = await self._requested(request, principal)
        if row.state is EngineState.STOPPED and status_of(row).value == "unloaded":
            raise BadRequest(f"the model {row.name} is not loaded")
        return await self._run(row, "unload", self.unload, actor)


def llama_cpp_router(
    catalogue: Catalogue,
    client: ClientKey,
    row_of: Callable[[Model], ModelRow],
    operations: ModelOperations,
    audit: AuditTrail,
    acts: ActLimiter,
    *,
    load: ModelAction,
    unload: ModelAction,
) -> APIRouter:
    """Return the routes; `load` and `unload` act on a model by its own name."""
    models = _Models(
        catalogue=catalogue,
        row_of=row_of,
        operations=operations,
        audit=audit,
        acts=acts,
        load=load,
        unload=unload,
    )
    router = APIRouter(tags=["models"], dependencies=[Depends(client)])
    success: Responses = {200: {"headers": rate_headers()}}
    errors = (*CLIENT, *BODY, PermissionDenied, MissingModel, ModelNotFound, Conflict)
    responses: Responses = {**error_responses(*errors, BadRequest, EngineUnavailable), **success}
    router.get(
        "/models",
        responses={**error_responses(*CLIENT), **success},
        response_model_exclude_none=True,
    )(models.list_models)
    for path, act in (("load", models.load_model), ("unload", models.unload_model)):
        router.post(f"/models/{path}", responses=responses, openapi_extra=_REQUEST)(act)
    return router


def _described(model: Model, row: ModelRow) -> LlamaCppModel:
    return LlamaCppModel(
        id=model.name, created=model.created, aliases=row.aliases, status=status_of(row)
    )


def _without_reason(error: BaseException, operation: str) -> BaseException:
    """Return the error of an operation for a client: a reason may hold paths and arguments."""
    if not isinstance(error, EngineUnavailable):
        return error
    return EngineUnavailable(f"{operation} failed; /admin/models has the reason")


def _model_of(body: bytes) -> str:
    """Return the model that a body names. Raises InvalidJson and MissingModel."""
    try:
        return _NamedModel.model_validate_json(body).model
    except ValidationError as error:
        fault = error.errors(include_input=False)[0]
        if not fault["loc"]:
            raise InvalidJson("the body is not a JSON object") from None
        raise MissingModel("model must be a non-empty string") from None
