"""The whole gateway in one place: what a request meets, in order, and who owns it.

    client ─▶ [CORS] ─▶ DataPlane ─▶ Relay: auth ─▶ admission ─▶ routing ─▶ engine
                            └▶ RequestId ─▶ HeadAsGet ─▶ /v1/models, /health, /ready, /metrics

`create_app` builds everything; the lifespan starts the engines and ends them.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from app import errors
from app.admission.admission import Admission
from app.api.dataplane import DataPlane
from app.api.middleware import HeadAsGet, RequestId
from app.api.models import models_router
from app.api.ops import ops_router
from app.auth.keys import Authenticator
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
    queues = {model.name: model.queue for model in settings.models}
    admission = Admission(metrics, queues, lambda name: catalogue.find(name).ready)
    authenticator = Authenticator(settings.api_keys, enabled=settings.auth.enabled)
    access = AccessLog()
    attempts = Attempts(LeastLoaded(), metrics)
    server = settings.server
    limits = RelayLimits(server.max_body_bytes, server.client_stall_s, server.sse_keepalive_s)
    relay = Relay(authenticator, admission, catalogue, attempts, metrics, access, limits)
    state = State(settings, catalogue, admission, metrics, access)
    metrics.watch_engines(lambda: _engine_states(catalogue), [str(s) for s in EngineState])

    app = FastAPI(
        title="vllm-gateway",
        lifespan=_lifespan,
        openapi_url=None,
        # A redirect to the path with a slash would be built from the client's Host header.
        redirect_slashes=False,
        exception_handlers={
            errors.GatewayError: _answer_gateway_error,
            HTTPException: _answer_http_exception,
            Exception: _answer_unexpected,
        },
    )
    app.state.gateway = state
    app.include_router(models_router(catalogue, authenticator))
    app.include_router(ops_router(catalogue, admission, metrics))
    # What is added last is met first.
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
    starting = asyncio.create_task(_start_engines(state), name="start engines")
    try:
        yield
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.gather(*(engine.stop(STOP_GRACE_S) for engine in engines))
        state.access.flush()


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
    body = error.body(errors.dialect_of(request.scope["path"]))
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(body, error.status, headers, media_type="application/json")


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
    else:
        known = errors.GatewayError(str(error.detail))
    return await _answer_gateway_error(request, known)


async def _answer_unexpected(request: Request, _: Exception) -> Response:
    return await _answer_gateway_error(request, errors.GatewayError("internal error"))
