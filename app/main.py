"""The whole gateway in one place: what a request meets, in order, and who owns it.

    client ─▶ [CORS] ─▶ DataPlane ─▶ Relay: auth ─▶ admission ─▶ routing ─▶ engine
                            └▶ RequestId ─▶ HeadAsGet ─▶ AdminDoor ─▶ /v1/models, /health, …

`create_app` builds everything; the lifespan starts the engines and ends them.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from app import errors
from app.admission import Admission
from app.api.access import MAX_BODY_BYTES, AdminDoor, error_response
from app.api.admin_keys import keys_router
from app.api.dataplane import DataPlane
from app.api.middleware import HeadAsGet, RequestId
from app.api.models import models_router
from app.api.ops import ops_router
from app.api.schema import schema_router
from app.auth.fields import faults
from app.auth.keys import Authenticator
from app.auth.store import KeyStore, NameTaken, UnknownKey
from app.database.database import Database, DatabaseUnavailable
from app.relay.attempts import Attempts
from app.relay.relay import Relay, RelayLimits
from app.routing.catalogue import Bounds, Catalogue, Model, Replica
from app.routing.policy import LeastLoaded
from app.settings import ModelSettings, Settings
from app.telemetry.access import AccessLog
from app.telemetry.metrics import Metrics
from engines.base import Engine, EngineState, EngineUnavailable
from engines.process import ProcessEngine, vllm_launcher
from engines.remote import RemoteEngine
from engines.spec import EngineSpec, ProcessSpec

log = logging.getLogger(__name__)

# vLLM has nothing in flight by now, so this is only the time it takes to tear down.
STOP_GRACE_S = 5.0
# What a page from another origin may read beside the body.
EXPOSED_HEADERS = ("retry-after", "x-request-id")
# How long a remote server is waited for before the gateway says it is up without it.
REMOTE_START_S = 10.0


@dataclass(slots=True)
class State:
    """What the running gateway consists of; `app.state.gateway`."""

    settings: Settings
    catalogue: Catalogue
    admission: Admission
    metrics: Metrics
    access: AccessLog
    database: Database
    key_store: KeyStore
    authenticator: Authenticator
    # What the server runs: the data plane before FastAPI, whose layers it does not need.
    door: ASGIApp = field(init=False)
    # Set when every engine that is started at once is READY or FAILED.
    settled: asyncio.Event = field(default_factory=asyncio.Event)


def create_app(settings: Settings, *, launcher: Sequence[str] | None = None) -> FastAPI:
    """Return the gateway's application.

    `launcher` runs vLLM's server, default: this interpreter's vLLM. Raises LauncherMissing.
    """
    metrics = Metrics()
    catalogue = build_catalogue(settings, launcher)
    admission = Admission(metrics)
    database = Database(settings.state.database_url.get_secret_value())
    key_store = KeyStore(database)
    authenticator = Authenticator(
        key_store,
        static=settings.api_keys,
        admin=settings.admin_key,
        enabled=settings.auth.enabled,
        limits=settings.limits.default,
        offline_grace_s=settings.auth.offline_grace_s,
    )
    access = AccessLog()
    attempts = Attempts(LeastLoaded(), metrics)
    server = settings.server
    limits = RelayLimits(server.max_body_bytes, server.client_stall_s, server.sse_keepalive_s)
    relay = Relay(authenticator, admission, catalogue, attempts, metrics, access, limits)
    state = State(
        settings, catalogue, admission, metrics, access, database, key_store, authenticator
    )
    metrics.watch_engines(lambda: _engine_states(catalogue), [str(s) for s in EngineState])

    app = FastAPI(
        title="vllm-gateway",
        lifespan=_lifespan,
        openapi_url=None,  # app/api/schema.py serves it, to those who have a key for it
        # A redirect to the path with a slash would be built from the client's Host header.
        redirect_slashes=False,
        exception_handlers={
            errors.GatewayError: _answer_gateway_error,
            HTTPException: _answer_http_exception,
            RequestValidationError: _answer_invalid,
            DatabaseUnavailable: _answer_database,
            NameTaken: _answer_name_taken,
            UnknownKey: _answer_unknown_key,
            Exception: _answer_unexpected,
        },
    )
    app.state.gateway = state
    app.include_router(models_router(catalogue, authenticator))
    app.include_router(ops_router(catalogue, admission, metrics))
    app.include_router(keys_router(key_store, authenticator))
    app.include_router(schema_router(authenticator))
    # What is added last is met first.
    app.add_middleware(AdminDoor, authenticator=authenticator, metrics=metrics)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestId)
    state.door = DataPlane(app, relay)
    if server.cors_origins:
        state.door = CORSMiddleware(
            state.door,
            allow_origins=server.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # OpenAI's SDK sends a dozen of its own
            expose_headers=EXPOSED_HEADERS,
        )
    return app


def build_catalogue(settings: Settings, launcher: Sequence[str] | None = None) -> Catalogue:
    """Return every model with its engines, none of them started. Raises LauncherMissing."""
    run_dir = settings.server.run_dir.absolute()
    return Catalogue([_build_model(model, run_dir, launcher) for model in settings.models])


def _build_model(settings: ModelSettings, run_dir: Path, launcher: Sequence[str] | None) -> Model:
    replicas: list[Replica] = []
    for spec in settings.engines:
        for _ in range(spec.replicas if isinstance(spec, ProcessSpec) else 1):
            name = f"{_slug(settings.name)}-{len(replicas)}"
            replicas.append(_build_replica(name, settings.name, spec, run_dir, launcher))
    bounds = Bounds(settings.max_choices, settings.max_output_tokens)
    return Model(settings.name, settings.aliases, tuple(replicas), bounds)


def _build_replica(
    name: str, model: str, spec: EngineSpec, run_dir: Path, launcher: Sequence[str] | None
) -> Replica:
    if isinstance(spec, ProcessSpec):
        command = launcher or vllm_launcher()
        engine = ProcessEngine(name, spec, served_name=model, run_dir=run_dir, launcher=command)
        return Replica(engine, model)
    return Replica(RemoteEngine(name, spec), spec.served_model_name or model)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".")[:40]


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the engines in the background, so that /health answers meanwhile; end them all."""
    state: State = app.state.gateway
    engines = state.catalogue.engines
    await state.database.open()
    polling = asyncio.create_task(state.authenticator.run(), name="poll the key store")
    await _hint(state)
    starting = asyncio.create_task(_start_engines(state), name="start engines")
    try:
        yield
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.gather(*(engine.stop(STOP_GRACE_S) for engine in engines))
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await state.authenticator.close()
        await state.database.close()
        state.access.flush()


async def _hint(state: State) -> None:
    """Tell how to make a key where there is none that a client could use."""
    if state.settings.auth.enabled and not state.settings.api_keys:
        with contextlib.suppress(DatabaseUnavailable):
            if not await state.key_store.has_client():
                log.info("no client key yet: vllm-gateway keys create --name NAME")


async def _start_engines(state: State) -> None:
    turn = asyncio.Semaphore(state.settings.server.parallel_starts)

    async def start(engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        try:
            if isinstance(engine, ProcessEngine):
                async with turn:
                    # The engine has its own bound, start_timeout_s, and knows why it failed.
                    await engine.ensure_ready(deadline=float("inf"))
            else:
                await engine.ensure_ready(loop.time() + REMOTE_START_S)
        except EngineUnavailable as error:
            log.debug("%s did not start: %s", engine.name, error)
        else:
            log.info("engine %s is ready", engine.name)

    await asyncio.gather(*(start(engine) for engine in state.catalogue.engines))
    state.settled.set()


def _engine_states(catalogue: Catalogue) -> Iterable[tuple[str, str, str]]:
    for model in catalogue.models:
        for replica in model.replicas:
            yield model.name, replica.engine.name, str(replica.engine.state)


# Errors outside the relay, which answers its own


async def _answer_gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.GatewayError)
    if isinstance(error, errors.InvalidApiKey):
        state: State = request.app.state.gateway
        state.metrics.auth_failure(error.reason)
    return error_response(error, request.scope["path"])


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path: str = request.scope["path"]
    known: errors.GatewayError
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"allow": f"{allowed}, OPTIONS"})
        known = errors.MethodNotAllowed(f"{path} takes {allowed}", allowed)
    elif error.status_code == 404:
        known = errors.RouteNotFound(f"there is no {path} here")
    elif error.status_code == 413:
        known = errors.RequestTooLarge(f"the body is over the limit of {MAX_BODY_BYTES} bytes")
    elif error.status_code == 400:
        known = errors.InvalidJson("the body is not JSON that can be read")
    else:
        known = errors.GatewayError(str(error.detail))
    return await _answer_gateway_error(request, known)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    """Tell of the first fault: which field, and what it must be; never what was sent."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = first["loc"][1:]  # without `body` or `query`
    known: errors.GatewayError
    if first["type"] == "json_invalid":
        known = errors.InvalidJson("the body is not JSON")
    elif not place:
        known = errors.BadRequest("the body must be a JSON object, with its content type")
    else:
        known = errors.BadRequest(faults([{**first, "loc": place}])[0])
    return await _answer_gateway_error(request, known)


async def _answer_database(request: Request, error: Exception) -> Response:
    log.warning("%s %s: %s", request.method, request.scope["path"], error)
    known = errors.ServiceUnavailable("the key store does not answer; try again")
    return await _answer_gateway_error(request, known)


async def _answer_name_taken(request: Request, error: Exception) -> Response:
    return await _answer_gateway_error(request, errors.BadRequest(str(error)))


async def _answer_unknown_key(request: Request, error: Exception) -> Response:
    return await _answer_gateway_error(request, errors.RouteNotFound(str(error)))


async def _answer_unexpected(request: Request, _: Exception) -> Response:
    return await _answer_gateway_error(request, errors.GatewayError("internal error"))
