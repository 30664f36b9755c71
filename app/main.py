"""Builds the gateway: which parts there are, and what each is given.

A request of the data plane takes the short way, without ASGI. `relay` owns it from its headers to
its ledger row, and calls every other package on the way:

    client ─▶ server ─▶ DataPlaneDispatcher ─▶ Relay ─┬─ auth       identify the caller
                                                      ├─ limits     reserve requests and tokens
                                                      ├─ usage      check budgets
                                                      ├─ residency  load the model
                                                      ├─ admission  wait in the model's queue
                                                      ├─ routing    choose a replica
                                                      ├─ engines ─▶ vLLM
                                                      └─ usage, telemetry  record it once

Every other request is FastAPI's, below middleware:

    client ─▶ server ─▶ [CORS] ─▶ HeadMiddleware ─▶ AccessLogMiddleware
                                                                   ▼
                               routes ◀─ AdminAuth ◀─ RequestMetricsMiddleware

`create_app` starts nothing; `Application.run` starts and releases what it built.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from app.admission import Admission
from app.api import (
    EXCEPTION_HANDLERS,
    AccessLogMiddleware,
    AdminAuth,
    ClientKey,
    CorsHeaders,
    DataPlaneDispatcher,
    HeadMiddleware,
    ModelAction,
    PreflightMiddleware,
    RequestMetricsMiddleware,
    RequireRight,
    Right,
    admin_models_router,
    engines_router,
    find_none,
    keys_router,
    llama_cpp_router,
    logs_router,
    metrics_router,
    model_row,
    model_rows,
    models_router,
    ops_router,
    owners_router,
    reload_router,
    requests_router,
    require_client_key,
    schema_router,
    status_of,
    usage_router,
)
from app.application import Application
from app.auth import Authenticator, KeyStore, OwnerStore
from app.console import Console
from app.database import Database, SharedSecret
from app.discovery import FindSource, find_source
from app.fleet import (
    Builder,
    EngineLifecycle,
    EnginesPage,
    ModelOperations,
    ModelRow,
    adoptable_engines,
    build_models,
    eager_memory_gib,
    engine_figures,
    engine_states,
)
from app.limits import Limiter
from app.relay import (
    Relay,
    RelayBounds,
    RelayServices,
    RequestDirectory,
    RequestsInFlight,
    memory_bounds,
)
from app.reload import Adjustable, Reloader
from app.request_body import BodyMemory, CacheSalts
from app.residency import OnDemandLoader
from app.routing import Catalogue, Model
from app.scaling import Autoscaler
from app.settings import Settings
from app.sharing import load_sharing_on
from app.stored import StoredResponses
from app.telemetry import NO_RECORDER, RecentRequests, TracedRequests
from app.telemetry.logs import AccessLog, DirectOutput, Levels, Output, is_json
from app.telemetry.metrics import Metrics
from app.telemetry.traces import tracer_for
from app.usage import Budgets, Ledger, usage_report
from app.usage.alerts import Alerts
from engines.base import EngineState
from engines.process import running_engines

if TYPE_CHECKING:  # OpenTelemetry is imported only where traces go somewhere
    from app.telemetry.traces.tracer import Tracer

# Response headers that a page of another origin may read.
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
# The name of the secret that seals sessions of the console.
SESSION_SECRET = "console_session"  # noqa: S105 - a name


def create_app(
    settings: Settings,
    *,
    launcher: Sequence[str] | None = None,
    source: Callable[[], Settings] | None = None,
    tracer: "Tracer | None" = None,
    output: Output | None = None,
    find_source: FindSource = find_source,
) -> Application:
    """Build a gateway that is not started.

    `launcher` runs vLLM's server; default: this interpreter's vLLM. `source` reads the settings
    again for a reload; default: they stay as they are. `tracer` makes traces; default: as the
    settings say. `output` takes the access lines; default: standard error. `find_source` returns
    what lists discovered servers. Raises LauncherMissing, and ConfigError when the GPUs that
    engines ask for do not fit or the packages for traces are missing.
    """
    metrics = Metrics()
    output = output or DirectOutput()
    access = AccessLog(output, as_json=is_json(settings.logs))
    levels = Levels(settings.logs)
    if tracer is None:
        tracer = tracer_for(settings.traces)
    server = settings.server
    run_dir = server.run_dir.absolute()
    builder = Builder(settings, launcher)
    left_running = running_engines(run_dir)
    deployments = build_models(settings, builder, left_running)
    catalogue = Catalogue([deployment.model() for deployment in deployments])
    database = Database(settings.state.database_url.get_secret_value())
    salt_secret = SharedSecret(database, SALT_SECRET)
    key_store = KeyStore(database)
    owner_store = OwnerStore(database)
    in_flight = RequestsInFlight()
    recent: RecentRequests | None = None
    if settings.console.enabled:
        recent = RecentRequests() if tracer is None else TracedRequests(tracer)
    requests = RequestDirectory(in_flight, recent)
    authenticator = Authenticator(
        key_store,
        static=settings.api_keys,
        admin=settings.admin_key,
        enabled=settings.auth.enabled,
        limits=settings.limits.default,
        offline_grace_s=settings.auth.offline_grace_s,
        on_cut=in_flight.end_requests,
    )
    limiter = Limiter(settings.limits, settings.state, metrics)
    prices = {model.name: model.price for model in settings.models}
    ledger = Ledger(database, metrics, prices, settings.usage.retention_days)
    alerts = None
    if settings.alerts.webhook_url is not None:
        alerts = Alerts(settings.alerts, database, metrics, lambda: ledger.written)
    budgets = Budgets(database, ledger, listener=alerts)
    queues = {model.name: model.queue for model in settings.models}
    admission = Admission(metrics, queues, catalogue.count_slots, catalogue.changes)
    load_sharing = load_sharing_on(settings.state, catalogue, metrics, lambda: admission.draining)
    loader = OnDemandLoader(
        [model for one in deployments if (model := one.on_demand()) is not None],
        metrics,
        engine_changes=catalogue.changes,
        budget_gib=server.memory_budget_gib,
        fixed_gib=lambda: eager_memory_gib(catalogue) + reloader.uncounted_gib,
        slots=server.parallel_starts,
    )
    stored = StoredResponses(database)
    body_memory = BodyMemory(memory_bounds(settings))
    services = RelayServices(
        limiter=limiter,
        budgets=budgets,
        admission=admission,
        loader=loader,
        catalogue=catalogue,
        metrics=metrics,
        bounds=RelayBounds.of(settings),
        body_memory=body_memory,
        salts=CacheSalts(lambda: salt_secret.value),
        stored=stored,
        in_flight=in_flight,
    )
    engine_lifecycle = EngineLifecycle(
        catalogue,
        loader,
        metrics,
        run_dir,
        lambda: reloader.settings.server.keep_engines,
        adoptable_engines(deployments, left_running),
        lambda: reloader.discovery.wait_until_settled(),
    )
    reloader = Reloader(
        settings,
        deployments,
        Adjustable(services, authenticator, ledger, levels),
        source=source or (lambda: settings),
        builder=builder,
        find_source=find_source,
        engines_tried=engine_lifecycle.engines_tried,
    )
    operations = ModelOperations(catalogue, run_dir)
    session_secret = SharedSecret(database, SESSION_SECRET)
    application = Application(
        catalogue=catalogue,
        database=database,
        key_store=key_store,
        authenticator=authenticator,
        limiter=limiter,
        load_sharing=load_sharing,
        budgets=budgets,
        ledger=ledger,
        admission=admission,
        loader=loader,
        metrics=metrics,
        access=access,
        tracer=tracer,
        reloader=reloader,
        autoscaler=Autoscaler(reloader, admission, engine_lifecycle.startup_done),
        operations=operations,
        engine_lifecycle=engine_lifecycle,
        engines_page=EnginesPage(catalogue, metrics),
        shared_secrets=(salt_secret, session_secret),
        body_memory=body_memory,
        stored_responses=stored,
        in_flight=in_flight,
        requests=requests,
        alerts=alerts,
    )
    _watch(application, output)
    client = require_client_key(authenticator, limiter, metrics)
    auditor = RequireRight(authenticator, Right.USAGE_READ)
    metrics_pages = metrics_router(metrics, application.engines_page, settings.metrics_key)

    def gateways() -> int | None:
        if load_sharing is None or not load_sharing.available:
            return None
        return load_sharing.gateways

    console = None
    if settings.console.enabled:
        console = Console(
            authenticator=authenticator,
            secret=session_secret,
            database=database,
            limiter=limiter,
            catalogue=catalogue,
            key_store=key_store,
            owner_store=owner_store,
            requests=requests,
            model_rows=partial(model_rows, services, operations),
            draining=lambda: admission.draining,
            price_of=ledger.price_of,
            metrics=metrics,
            settings=lambda: reloader.settings,
            devices=builder.devices,
            in_flight=lambda: admission.in_flight,
            unused=reloader.discovery.unused,
            gateways=gateways,
        )
    routers = [
        *(console.routers() if console is not None else ()),
        *_model_routers(services, operations, authenticator, client, server.llama_cpp_models),
        usage_router(partial(usage_report, database), client, auditor, key_store.id_for_reports),
        ops_router(services.forecasts, admission),
        *([metrics_pages] if settings.metrics.port is None else []),
        keys_router(key_store, authenticator, catalogue),
        owners_router(owner_store, authenticator),
        reload_router(reloader, authenticator),
        logs_router(levels, authenticator),
        requests_router(requests, key_store, authenticator),
        engines_router(
            catalogue,
            operations,
            authenticator,
            lambda: admission.draining,
            gateways,
            reloader.discovery.unused,
        ),
        schema_router(authenticator),
    ]
    relay = Relay(
        authenticator=authenticator,
        services=services,
        ledger=ledger,
        access=access,
        recorder=recent or tracer or NO_RECORDER,
    )
    _add_asgi(application, relay, routers, console)
    if settings.metrics.port is not None:
        metrics_app = _fastapi(metrics_pages)
        application.metrics_asgi = HeadMiddleware(AccessLogMiddleware(metrics_app, access))
    return application


def _add_asgi(
    application: Application, relay: Relay, routers: Sequence[APIRouter], console: Console | None
) -> None:
    """Put the ASGI application and the dispatcher of the data plane before the parts."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(application.run())
            if console is not None:
                stack.push_async_callback(console.aclose)
                console.start()
            yield

    app = _fastapi(*routers, lifespan=lifespan)
    app.add_middleware(
        AdminAuth, authenticator=application.authenticator, metrics=application.metrics
    )
    app.add_middleware(RequestMetricsMiddleware, metrics=application.metrics)
    if console is not None:
        app.add_middleware(console.guard)
    application.routes = app.routes
    # Outside of FastAPI's own layers, the outermost of which answers unhandled exceptions.
    application.asgi = HeadMiddleware(AccessLogMiddleware(app, application.access))
    find_other = find_none if console is None else console.find_handler(relay)
    application.dispatcher = DataPlaneDispatcher(relay, find_other=find_other)
    if origins := application.settings.server.cors_origins:
        cors = CORSMiddleware(
            application.asgi,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # OpenAI's SDK sends a dozen of its own
            expose_headers=EXPOSED_HEADERS,
        )
        application.asgi = PreflightMiddleware(cors, application.access)
        application.dispatcher = DataPlaneDispatcher(relay, CorsHeaders(cors), find_other)


def _fastapi(
    *routers: APIRouter,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """Return an application with the routes of routers.

    FastAPI's include_router would make each route a second time: 18 ms.
    """
    app = FastAPI(
        lifespan=lifespan,
        openapi_url=None,  # app/api/schema.py serves it, to those who have a key for it
        # A redirect to the path with a slash would be built from the client's Host header.
        redirect_slashes=False,
        exception_handlers=dict(EXCEPTION_HANDLERS),
    )
    for router in routers:
        app.router.routes.extend(router.routes)
    return app


def _watch(application: Application, output: Output) -> None:
    """Have the metrics read at each scrape what the parts know."""
    metrics, catalogue, admission = (
        application.metrics,
        application.catalogue,
        application.admission,
    )
    if application.tracer is not None:
        metrics.watch_spans(application.tracer.counts)
    metrics.watch_log(lambda: output.lost)
    metrics.watch_engines(lambda: engine_states(catalogue), [str(s) for s in EngineState])
    metrics.watch_figures(lambda: engine_figures(catalogue))
    metrics.watch_discovery(application.reloader.discovery.counts)
    metrics.watch_queues(admission.queue_limits)
    metrics.watch_scaling(application.autoscaler.wanted)
    metrics.watch_in_flight(admission.in_flight_by_model)
    metrics.watch_budgets(application.budgets.usage_levels)
    metrics.watch_ledger(lambda: application.ledger.pending)
    metrics.watch_loop(application.loop_lag.read)
    metrics.watch_models(lambda: ((model.name, model.on_demand) for model in catalogue.models))


def _model_routers(
    services: RelayServices,
    operations: ModelOperations,
    authenticator: Authenticator,
    client: ClientKey,
    llama_cpp: bool,
) -> Iterator[APIRouter]:
    """Yield the routes that list models, load and unload them; `llama_cpp` adds that dialect."""
    catalogue, loader = services.catalogue, services.loader
    load = _by_residency(loader, loader.load, operations.load)
    unload = _by_residency(loader, loader.unload, operations.unload)

    def row_of(model: Model) -> ModelRow:
        return model_row(model, services, operations)

    if llama_cpp:
        yield models_router(catalogue, client, lambda model: status_of(row_of(model)))
        yield llama_cpp_router(catalogue, client, row_of, operations, load=load, unload=unload)
    else:
        yield models_router(catalogue, client)
    yield admin_models_router(services, operations, authenticator, load=load, unload=unload)


def _by_residency(
    loader: OnDemandLoader, on_demand: ModelAction, eager: ModelAction
) -> ModelAction:
    """Return one action for models on demand, and another for those that are always loaded."""

    async def act(model: str) -> None:
        await (on_demand if model in loader else eager)(model)

    return act
