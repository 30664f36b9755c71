"""The whole gateway in one place: what a request meets, in order, and who owns it.

    client ─▶ [CORS] ─▶ DataPlane ─▶ Relay: auth ─▶ limits ─▶ residency ─▶ admission ─▶ routing
                            │                  │                                           └▶ engine
                            │                  └▶ usage, telemetry at the end, whatever happened
                            └▶ RequestId ─▶ HeadAsGet ─▶ AdminDoor ─▶ /v1/models, /admin, …

`create_app` builds everything; the lifespan starts it and ends it.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from app.admission.admission import Admission
from app.api.access import AdminDoor, Right, guard
from app.api.admin_keys import keys_router
from app.api.answers import ANSWERS
from app.api.caller import caller
from app.api.dataplane import DataPlane
from app.api.middleware import HeadAsGet, RequestId
from app.api.models import models_router
from app.api.ops import ops_router
from app.api.schema import schema_router
from app.api.usage import usage_router
from app.auth.keys import Authenticator
from app.auth.store import KeyStore
from app.database.database import Database, DatabaseUnavailable
from app.errors import GatewayError
from app.limits.limiter import Limiter
from app.relay.attempts import Attempts
from app.relay.relay import Relay, RelayBounds
from app.residency.keeper import Keeper, OnDemand
from app.routing.catalogue import Bounds, Catalogue, Model, Replica
from app.routing.policy import LeastLoaded
from app.settings import ModelSettings, Settings
from app.telemetry.access import AccessLog
from app.telemetry.metrics import Metrics
from app.usage.budgets import Budgets
from app.usage.ledger import Ledger
from app.usage.report import usage_report
from engines.base import Engine, EngineState, EngineUnavailable
from engines.link import RECORD, end_strangers
from engines.process import ProcessEngine, vllm_launcher
from engines.remote import RemoteEngine
from engines.spec import EngineSpec, InProcessSpec, ProcessSpec

log = logging.getLogger(__name__)

# vLLM has nothing in flight by now, so this is only the time it takes to tear down.
STOP_GRACE_S = 5.0
# What a page from another origin may read beside the body.
EXPOSED_HEADERS = (
    "retry-after",
    "x-request-id",
    *(
        f"x-ratelimit-{what}-{unit}"
        for what in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)
# How long a remote server is waited for before the gateway says it is up without it.
REMOTE_START_S = 10.0
LOOK_S = 0.2


@dataclass(slots=True)
class State:
    """What the running gateway consists of; `app.state.gateway`."""

    settings: Settings
    catalogue: Catalogue
    database: Database
    key_store: KeyStore
    authenticator: Authenticator
    limiter: Limiter
    budgets: Budgets
    ledger: Ledger
    admission: Admission
    keeper: Keeper
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
    access = AccessLog()
    catalogue = build_catalogue(settings, launcher)
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
    limiter = Limiter(settings.limits, settings.state, metrics)
    prices = {model.name: model.price for model in settings.models}
    ledger = Ledger(database, metrics, prices, settings.usage.retention_days)
    budgets = Budgets(database, ledger)
    queues = {model.name: model.queue for model in settings.models}
    admission = Admission(metrics, queues, catalogue.ready_engines)
    server = settings.server
    keeper = Keeper(
        on_demand(settings, catalogue),
        metrics,
        budget_gib=server.memory_budget_gib,
        fixed_gib=partial(_eager_gib, catalogue),
        slots=server.parallel_starts,
    )
    relay = Relay(
        authenticator,
        limiter,
        budgets,
        admission,
        keeper,
        catalogue,
        Attempts(LeastLoaded(), metrics),
        ledger,
        metrics,
        access,
        RelayBounds(
            server.max_body_bytes,
            server.client_stall_s,
            server.sse_keepalive_s,
            settings.limits.unstated_output_tokens,
            settings.limits.cached_token_weight,
        ),
    )
    state = State(
        settings,
        catalogue,
        database,
        key_store,
        authenticator,
        limiter,
        budgets,
        ledger,
        admission,
        keeper,
        metrics,
        access,
    )
    metrics.watch_engines(lambda: _engine_states(catalogue), [str(s) for s in EngineState])

    app = FastAPI(
        title="vllm-gateway",
        lifespan=_lifespan,
        openapi_url=None,  # app/api/schema.py serves it, to those who have a key for it
        # A redirect to the path with a slash would be built from the client's Host header.
        redirect_slashes=False,
        exception_handlers=dict(ANSWERS),
    )
    app.state.gateway = state
    client = caller(authenticator, limiter, metrics)
    auditor = guard(authenticator, Right.USAGE_READ)
    app.include_router(models_router(catalogue, client))
    app.include_router(usage_router(partial(usage_report, database), client, auditor))
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
    house = _House(settings, launcher)
    return Catalogue([_build_model(model, house) for model in settings.models])


class _House:
    """What the engines of this machine have in common."""

    def __init__(self, settings: Settings, launcher: Sequence[str] | None) -> None:
        self.run_dir = settings.server.run_dir.absolute()
        self.launcher = launcher
        self.turn = asyncio.Semaphore(settings.server.parallel_starts)
        self.keep = settings.server.keep_engines


def _build_model(settings: ModelSettings, house: _House) -> Model:
    replicas: list[Replica] = []
    for spec in settings.engines:
        for _ in range(spec.replicas if isinstance(spec, ProcessSpec) else 1):
            name = f"{_slug(settings.name)}-{len(replicas)}"
            replicas.append(_build_replica(name, settings.name, spec, house))
    bounds = Bounds(settings.max_choices, settings.max_output_tokens)
    on_demand = settings.load == "on_demand"
    return Model(
        settings.name, settings.aliases, tuple(replicas), bounds, settings.limits, on_demand
    )


def on_demand(settings: Settings, catalogue: Catalogue) -> list[OnDemand]:
    """Return the models that are loaded on demand, for the keeper."""
    told = {model.name: model for model in settings.models}
    found: list[OnDemand] = []
    for model in catalogue.models:
        if model.on_demand:
            engines = [replica.engine for replica in model.replicas]
            loadable = tuple(engine for engine in engines if isinstance(engine, ProcessEngine))
            found.append(OnDemand(told[model.name], loadable))
    return found


def _eager_gib(catalogue: Catalogue) -> float:
    """Return what the engines take that are always loaded, as far as that is known."""
    engines = (r.engine for m in catalogue.models if not m.on_demand for r in m.replicas)
    return sum(e.memory_gib or 0.0 for e in engines if isinstance(e, ProcessEngine))


def _build_replica(name: str, model: str, spec: EngineSpec, house: _House) -> Replica:
    if isinstance(spec, ProcessSpec):
        engine = ProcessEngine(
            name,
            spec,
            served_name=model,
            run_dir=house.run_dir,
            launcher=house.launcher or vllm_launcher(),
            turn=house.turn,
            keep=house.keep,
        )
        return Replica(engine, model)
    if isinstance(spec, InProcessSpec):
        raise NotImplementedError("kind: in_process")
    return Replica(RemoteEngine(name, spec), spec.served_model_name or model)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".")[:40]


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the engines in the background, so that /health answers meanwhile; end them all."""
    state: State = app.state.gateway
    engines = state.catalogue.engines
    await state.database.open()
    background = [
        asyncio.create_task(state.authenticator.run(), name="poll the key store"),
        asyncio.create_task(state.limiter.run(), name="keep leases"),
        asyncio.create_task(state.ledger.run(), name="write usage"),
    ]
    await _hint(state)
    starting = asyncio.create_task(_start_engines(state), name="start engines")
    state.keeper.start()
    try:
        yield
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await state.keeper.close()
        await asyncio.gather(*(_part(engine, state.settings) for engine in engines))
        # Everything has ended by now; what is known of it is written before the database closes.
        await state.limiter.close()
        await state.ledger.close()
        await state.budgets.close()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
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
    run_dir = state.settings.server.run_dir.absolute()
    await end_strangers(run_dir, {e.name for e in state.catalogue.engines})

    async def start(model: str, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        # An engine of ours has its own bound, start_timeout_s, and knows why it failed.
        patience = inf if isinstance(engine, ProcessEngine) else loop.time() + REMOTE_START_S
        try:
            await engine.ensure_ready(patience)
        except EngineUnavailable as error:
            log.debug("%s did not start: %s", engine.name, error)
        else:
            log.info("engine %s is ready", engine.name)
            if engine.load_s is not None:
                state.metrics.engine_load(model, engine.load_s)

    eager = [model for model in state.catalogue.models if not model.on_demand]
    kept = [
        model.name
        for model in state.catalogue.models
        if model.on_demand and state.settings.server.keep_engines
        if any((run_dir / replica.engine.name / RECORD).exists() for replica in model.replicas)
    ]
    await asyncio.gather(
        *(start(m.name, replica.engine) for m in eager for replica in m.replicas),
        *(_take_over(state.keeper, name) for name in kept),
    )
    ours = [e for e in state.catalogue.engines if isinstance(e, ProcessEngine)]
    # One of them may come up by a restart, of which no event tells.
    while not state.catalogue.ready and not all(e.given_up for e in ours):  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    state.settled.set()


async def _take_over(keeper: Keeper, model: str) -> None:
    """Have a model on demand that the gateway before left loaded; else nobody counts its memory."""
    try:
        await keeper.load(model)
    except GatewayError as error:
        log.warning("model %s was loaded before and is not now: %s", model, error)


def hopeless(state: State) -> bool:
    """Whether nothing serves and nothing will: every engine is ours and was given up."""
    return all(isinstance(e, ProcessEngine) and e.given_up for e in state.catalogue.engines)


async def _part(engine: Engine, settings: Settings) -> None:
    """End an engine, or leave it to the next gateway."""
    if isinstance(engine, ProcessEngine) and settings.server.keep_engines:
        await engine.release()
    else:
        await engine.stop(STOP_GRACE_S)


def _engine_states(catalogue: Catalogue) -> Iterable[tuple[str, str, str]]:
    for model in catalogue.models:
        for replica in model.replicas:
            yield model.name, replica.engine.name, str(replica.engine.state)
