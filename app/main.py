"""The whole gateway in one place: what a request meets, in order, and who owns it.

    connection ─▶ DataPlane ─▶ Relay: auth ─▶ limits ─▶ residency ─▶ admission ─▶ routing ─▶ engine
        │                        └▶ usage, telemetry at the end, whatever happened
        └▶ [CORS] ─▶ HeadAsGet ─▶ Recorded ─▶ Counted ─▶ AdminDoor ─▶ FastAPI: /v1/models, /admin, …

`create_app` builds everything; the lifespan starts it and ends it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from app.admission import Admission
from app.api.admin_auth import AdminAuth, Right, guard
from app.api.admin_engines import engines_router
from app.api.admin_keys import keys_router
from app.api.admin_models import admin_models_router
from app.api.admin_owners import owners_router
from app.api.caller import caller
from app.api.cors import CorsHeaders
from app.api.data_plane import DataPlaneDispatcher
from app.api.exception_handlers import ANSWERS
from app.api.health import metrics_router, ops_router
from app.api.logs import logs_router
from app.api.middleware import Counted, HeadAsGet, Preflights, Recorded
from app.api.models import models_router
from app.api.reload import reload_router
from app.api.schema import schema_router
from app.api.usage import usage_router
from app.auth import Authenticator, KeyStore, OwnerStore
from app.database import Database, DatabaseUnavailable, SharedSecret
from app.errors import GatewayError
from app.fleet import (
    REMOTE_START_S,
    STOP_GRACE_S,
    Builder,
    EnginesPage,
    ModelDeployment,
    ModelOperations,
    build_deployments,
    config_hash,
    engine_figures,
    initial_slots,
)
from app.limits import Limiter
from app.relay.body_memory import BodyMemory
from app.relay.cache_salts import CacheSalts
from app.relay.in_flight import RequestsInFlight
from app.relay.relay import Relay
from app.relay.services import RelayBounds, RelayServices, memory_bounds
from app.reload import Adjustable, Reloader
from app.residency import OnDemandLoader
from app.routing import Catalogue
from app.settings import Settings
from app.stored import StoredResponses
from app.telemetry.logs import DirectOutput, Levels, Output, is_json
from app.telemetry.logs.access import AccessLog
from app.telemetry.metrics import EventLoopLag, Metrics
from app.telemetry.traces import NO_TRACER, tracer_for
from app.usage.alerts import Alerts
from app.usage.budgets import Budgets
from app.usage.ledger import Ledger
from app.usage.report import usage_report
from engines.base import Engine, EngineNotReady, EngineState
from engines.gpu.placement import Placement
from engines.guard.guardian_client import RECORD_FILE, stop_unconfigured
from engines.process import Origin, running_engines

if TYPE_CHECKING:  # OpenTelemetry is imported only where traces go somewhere
    from app.telemetry.traces.tracer import Tracer

log = logging.getLogger(__name__)

# What a page from another origin may read beside the body.
EXPOSED_HEADERS = (
    "retry-after",
    "x-gateway-model",
    "x-request-id",
    *(
        f"x-ratelimit-{what}-{unit}"
        for what in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)
# The name of the secret that salts of the prefix cache are made from.
SALT_SECRET = "cache_salt"  # noqa: S105 - a name


# What an operator has done to a model, by its name.
Act = Callable[[str], Awaitable[None]]


@dataclass(slots=True)
class State:
    """What the running gateway consists of; `app.state.gateway`."""

    catalogue: Catalogue
    database: Database
    key_store: KeyStore
    authenticator: Authenticator
    limiter: Limiter
    budgets: Budgets
    ledger: Ledger
    admission: Admission
    keeper: OnDemandLoader
    metrics: Metrics
    access: AccessLog
    tracer: "Tracer | None"
    reloader: Reloader
    orders: ModelOperations
    engines_page: EnginesPage
    salt_secret: SharedSecret
    body_memory: BodyMemory
    stored_responses: StoredResponses
    in_flight: RequestsInFlight
    alerts: Alerts | None
    lag: EventLoopLag = field(default_factory=EventLoopLag)
    # What the server runs: the data plane without ASGI, and FastAPI for everything else.
    dispatcher: DataPlaneDispatcher = field(init=False)
    door: ASGIApp = field(init=False)
    # What the metrics' own port serves; None: they are on the main port.
    metrics_door: ASGIApp | None = None
    # Set when every engine that is started at once is READY or FAILED.
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self.reloader.settings


def create_app(
    settings: Settings,
    *,
    launcher: Sequence[str] | None = None,
    source: Callable[[], Settings] | None = None,
    tracer: "Tracer | None" = None,
    output: Output | None = None,
) -> FastAPI:
    """Return the gateway's application.

    `launcher` runs vLLM's server, default: this interpreter's vLLM. `source` reads the settings
    again for a reload, default: they are what they were. `tracer` makes traces, default: as the
    settings say. `output` takes the access lines, default: standard error. Raises LauncherMissing,
    and ConfigError when the GPUs that engines ask for do not fit or the packages for traces are
    missing.
    """
    metrics = Metrics()
    output = output or DirectOutput()
    access = AccessLog(output, as_json=is_json(settings.logs))
    levels = Levels(settings.logs)
    if tracer is None:
        tracer = tracer_for(settings.traces)
    if tracer is not None:
        metrics.watch_spans(tracer.counts)
    builder = Builder(settings, launcher)
    standing = stand_up(settings, builder, running_engines(settings.server.run_dir.absolute()))
    catalogue = Catalogue([one.model() for one in standing])
    database = Database(settings.state.database_url.get_secret_value())
    salt_secret = SharedSecret(database, SALT_SECRET)
    key_store = KeyStore(database)
    in_flight = RequestsInFlight()
    authenticator = Authenticator(
        key_store,
        static=settings.api_keys,
        admin=settings.admin_key,
        enabled=settings.auth.enabled,
        limits=settings.limits.default,
        offline_grace_s=settings.auth.offline_grace_s,
        on_cut=in_flight.cut,
    )
    limiter = Limiter(settings.limits, settings.state, metrics)
    prices = {model.name: model.price for model in settings.models}
    ledger = Ledger(database, metrics, prices, settings.usage.retention_days)
    alerts = None
    if settings.alerts.webhook_url is not None:
        alerts = Alerts(settings.alerts, database, metrics, lambda: ledger.written)
    budgets = Budgets(database, ledger, watch=alerts)
    queues = {model.name: model.queue for model in settings.models}
    admission = Admission(metrics, queues, catalogue.ready_engines, catalogue.changes)
    server = settings.server
    keeper = OnDemandLoader(
        [model for one in standing if (model := one.on_demand()) is not None],
        metrics,
        engine_changes=catalogue.changes,
        budget_gib=server.memory_budget_gib,
        fixed_gib=lambda: _eager_gib(catalogue) + reloader.uncounted_gib,
        slots=server.parallel_starts,
    )
    stored = StoredResponses(database)
    body_memory = BodyMemory(memory_bounds(settings))
    rooms = RelayServices(
        limiter,
        budgets,
        admission,
        keeper,
        catalogue,
        metrics,
        RelayBounds.of(settings),
        body_memory,
        CacheSalts(lambda: salt_secret.value),
        stored,
        in_flight,
    )
    relay = Relay(authenticator, rooms, ledger, access, tracer or NO_TRACER)
    settled = asyncio.Event()
    reloader = Reloader(
        settings,
        standing,
        Adjustable(rooms, authenticator, ledger, levels),
        source=source or (lambda: settings),
        builder=builder,
        settled=settled,
    )
    orders = ModelOperations(catalogue, server.run_dir.absolute())
    state = State(
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
        tracer,
        reloader,
        orders,
        EnginesPage(catalogue, metrics),
        salt_secret,
        body_memory,
        stored,
        in_flight,
        alerts,
        settled=settled,
    )
    metrics.watch_log(lambda: output.lost)
    metrics.watch_engines(lambda: _engine_states(catalogue), [str(s) for s in EngineState])
    metrics.watch_figures(lambda: engine_figures(catalogue))
    metrics.watch_queues(admission.queue_limits)
    metrics.watch_in_flight(admission.in_flight_by_model)
    metrics.watch_budgets(budgets.used_up)
    metrics.watch_ledger(lambda: ledger.pending)
    metrics.watch_loop(state.lag.read)
    metrics.watch_models(lambda: ((model.name, model.on_demand) for model in catalogue.models))

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
    pages = metrics_router(metrics, state.engines_page, settings.metrics_key)
    if settings.metrics.port is not None:
        state.metrics_door = _metrics_app(pages, access)
    _serve(
        app,
        models_router(catalogue, client),
        usage_router(partial(usage_report, database), client, auditor, key_store.id_for_reports),
        ops_router(rooms.forecasts, admission),
        *([pages] if settings.metrics.port is None else []),
        keys_router(key_store, authenticator, catalogue),
        owners_router(OwnerStore(database), authenticator),
        reload_router(reloader, authenticator),
        logs_router(levels, authenticator),
        engines_router(catalogue, orders, authenticator, lambda: admission.draining),
        admin_models_router(
            rooms,
            orders,
            authenticator,
            load=_either(keeper, keeper.load, orders.load),
            unload=_either(keeper, keeper.unload, orders.unload),
        ),
        schema_router(authenticator),
    )
    app.add_middleware(AdminAuth, authenticator=authenticator, metrics=metrics)
    app.add_middleware(Counted, metrics=metrics)
    # Outside of FastAPI's own layers, the outermost of which answers what nobody caught.
    state.door = HeadAsGet(Recorded(app, access))
    state.dispatcher = DataPlaneDispatcher(relay)
    if server.cors_origins:
        cors = CORSMiddleware(
            state.door,
            allow_origins=server.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # OpenAI's SDK sends a dozen of its own
            expose_headers=EXPOSED_HEADERS,
        )
        state.door = Preflights(cors, access)
        state.dispatcher = DataPlaneDispatcher(relay, CorsHeaders(cors))
    return app


def _metrics_app(pages: APIRouter, access: AccessLog) -> ASGIApp:
    """Return what serves the metrics and nothing else."""
    app = FastAPI(openapi_url=None, redirect_slashes=False, exception_handlers=dict(ANSWERS))
    _serve(app, pages)
    return HeadAsGet(Recorded(app, access))


def _serve(app: FastAPI, *routers: APIRouter) -> None:
    """Have an application serve the routes of routers, which are complete.

    FastAPI's include_router makes each of them a second time, to add what is said there: 18 ms.
    """
    for router in routers:
        app.router.routes.extend(router.routes)


def _either(keeper: OnDemandLoader, on_demand: Act, eager: Act) -> Act:
    """Return what does one thing for models on demand and another for those always loaded."""

    async def act(model: str) -> None:
        await (on_demand if model in keeper else eager)(model)

    return act


def stand_up(
    settings: Settings, builder: Builder, running: Mapping[str, Origin]
) -> list[ModelDeployment]:
    """Return every model with its engines, none of them started.

    `running` has the engines that an earlier gateway has left: those that run what is wanted have
    their names and their GPUs again. Raises LauncherMissing, and ConfigError when the GPUs that
    engines ask for do not fit.
    """
    slots = initial_slots(settings, {name: origin.mark for name, origin in running.items()})
    builder.use(
        [
            (slot, Placement.on(gpus))
            for model, engines in slots.items()
            for slot in engines
            if (origin := running.get(slot.name)) is not None
            if origin.mark == config_hash(model, slot)
            if (gpus := origin.gpus) is not None
        ]
    )
    builder.use(builder.place([(model, slots[model.name]) for model in settings.models]))
    return build_deployments(settings, slots, builder)


def catalogue_of(settings: Settings, builder: Builder) -> Catalogue:
    """Return the models of a configuration. Raises what `create_app` does."""
    tracer_for(settings.traces)
    return Catalogue([one.model() for one in stand_up(settings, builder, {})])


def _eager_gib(catalogue: Catalogue) -> float:
    """Return what the engines take that are always loaded, as far as that is known."""
    engines = (r.engine for m in catalogue.models if not m.on_demand for r in m.replicas)
    return sum(engine.memory_gib or 0.0 for engine in engines)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the engines in the background, so that /health answers meanwhile; end them all."""
    state: State = app.state.gateway
    await state.database.open()
    with contextlib.suppress(DatabaseUnavailable):  # `run` tries again
        await state.salt_secret.load()
    background = [
        asyncio.create_task(state.salt_secret.run(), name="load the shared secret"),
        asyncio.create_task(state.authenticator.run(), name="poll the key store"),
        asyncio.create_task(state.stored_responses.run(), name="remove old owners"),
        asyncio.create_task(state.limiter.run(), name="keep leases"),
        asyncio.create_task(state.ledger.run(), name="write usage"),
    ]
    if state.alerts is not None:
        background.append(asyncio.create_task(state.alerts.run(), name="alerts"))
    await _hint(state)
    if state.tracer is not None:
        state.tracer.start()
    starting = asyncio.create_task(_start_engines(state), name="start engines")
    state.keeper.start()
    state.lag.start()
    try:
        yield
    finally:
        state.lag.stop()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await state.engines_page.close()
        await state.reloader.close()
        await state.orders.close()
        await state.keeper.close()
        await _end_engines(state)
        # Everything has ended by now; what is known of it is written before the database closes.
        await state.limiter.close()
        await state.ledger.close()
        await state.budgets.close()
        if state.alerts is not None:
            await state.alerts.close()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await state.authenticator.close()
        await state.database.close()
        if state.tracer is not None:
            await state.tracer.close()
        state.access.flush()


async def _hint(state: State) -> None:
    """Tell how to make a key where there is none that a client could use."""
    if state.settings.auth.enabled and not state.settings.api_keys:
        with contextlib.suppress(DatabaseUnavailable):
            if not await state.key_store.has_client():
                log.info("no client key yet: vllm-gateway keys create --name NAME")


async def _start_engines(state: State) -> None:
    run_dir = state.settings.server.run_dir.absolute()
    await stop_unconfigured(run_dir, {e.name for e in state.catalogue.engines})

    async def start(model: str, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        # An engine of ours has its own bound, start_timeout_s, and knows why it failed.
        patience = inf if engine.capabilities.managed else loop.time() + REMOTE_START_S
        try:
            await engine.ensure_ready(patience)
        except EngineNotReady as error:
            log.debug("%s did not start: %s", engine.name, error)
        else:
            log.info("engine %s is ready", engine.name, extra={"engine": engine.name})
            if engine.load_s is not None:
                state.metrics.engine_load.observe((model,), engine.load_s)

    eager = [model for model in state.catalogue.models if not model.on_demand]
    kept = [
        model.name
        for model in state.catalogue.models
        if model.on_demand and state.settings.server.keep_engines
        if any((run_dir / replica.engine.name / RECORD_FILE).exists() for replica in model.replicas)
    ]
    await asyncio.gather(
        *(start(m.name, replica.engine) for m in eager for replica in m.replicas),
        *(_take_over(state.keeper, name) for name in kept),
    )
    ours = [e for e in state.catalogue.engines if e.capabilities.managed]
    # One of them may come up by a restart.
    await state.catalogue.changes.wait_for(
        lambda: state.catalogue.ready or all(engine.given_up for engine in ours)
    )
    state.settled.set()


async def _take_over(keeper: OnDemandLoader, model: str) -> None:
    """Have a model on demand that the gateway before left loaded; else nobody counts its memory."""
    try:
        await keeper.load(model)
    except GatewayError as error:
        log.warning(
            "model %s was loaded before and is not now: %s", model, error, extra={"model": model}
        )


def hopeless(state: State) -> bool:
    """Whether nothing serves and nothing will: every engine is ours and was given up.

    One of a model on demand is tried again by the requests that want it.
    """
    if any(model.on_demand for model in state.catalogue.models):
        return False
    return all(engine.given_up for engine in state.catalogue.engines)


async def release_engines(state: State) -> None:
    """Let go of the engines that go on without this gateway; requests in flight go on."""
    if state.settings.server.keep_engines:
        await asyncio.gather(*(engine.release() for engine in state.catalogue.engines))


async def _end_engines(state: State) -> None:
    await release_engines(state)
    await asyncio.gather(*(engine.stop(STOP_GRACE_S) for engine in state.catalogue.engines))


def _engine_states(catalogue: Catalogue) -> Iterable[tuple[str, str, str]]:
    for model in catalogue.models:
        for replica in model.replicas:
            yield model.name, replica.engine.name, str(replica.engine.state)
