"""Builds what answers HTTP with the parts: routes, middleware, and the data plane's dispatcher.

A request of the data plane takes the short way, without ASGI (`app/main.py`). Every other request
is FastAPI's, below middleware:

    client ─▶ server ─▶ [CORS] ─▶ HeadMiddleware ─▶ AccessLogMiddleware
                                                                   ▼
                               routes ◀─ AdminAuth ◀─ RequestMetricsMiddleware
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from app.api import (
    EXCEPTION_HANDLERS,
    AccessLogMiddleware,
    ActLimiter,
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
    audit_router,
    captures_routers,
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
    own_capture,
    owners_router,
    reload_router,
    requests_router,
    require_client_key,
    schema_router,
    status_of,
    usage_router,
)
from app.application import Application
from app.console import Console, is_shown
from app.fleet import ModelRow
from app.relay import Relay
from app.reload import ModelEditor
from app.residency import OnDemandLoader
from app.routing import Model
from app.settings import ConfigurationFile, Settings
from app.usage import LoadMinutes, usage_report

# Response headers that a page of another origin may read.
EXPOSED_HEADERS = (
    "retry-after",
    "x-gateway-captured",
    "x-gateway-dropped-fields",
    "x-gateway-model",
    "x-request-id",
    *(
        f"x-ratelimit-{what}-{unit}"
        for what in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)


def add_http(
    application: Application, relay: Relay, source_of_text: Callable[[str], Settings] | None
) -> None:
    """Put the ASGI application and the dispatcher of the data plane before the parts.

    `source_of_text` reads the settings with another text of the file; None: it is not edited.
    """
    console, acts = None, ActLimiter(application.metrics)
    if application.settings.console.enabled:
        console = _console(application, _model_editor(application, source_of_text), acts)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(application.run())
            if console is not None:
                stack.push_async_callback(console.aclose)
                console.start()
            yield

    settings, access = application.settings, application.access
    metrics_pages = metrics_router(
        application.metrics, application.engines_page, settings.metrics_key
    )
    if settings.metrics.port is not None:
        application.metrics_asgi = HeadMiddleware(
            AccessLogMiddleware(_fastapi([metrics_pages]), access)
        )
    on_main_port = metrics_pages if settings.metrics.port is None else None
    app = _fastapi(_all_routers(console, application, on_main_port, acts), lifespan=lifespan)
    app.add_middleware(
        AdminAuth, authenticator=application.authenticator, metrics=application.metrics, acts=acts
    )
    app.add_middleware(RequestMetricsMiddleware, metrics=application.metrics)
    if console is not None:
        app.add_middleware(console.guard)
    application.routes = app.routes
    # Outside of FastAPI's own layers, the outermost of which answers unhandled exceptions.
    application.asgi = HeadMiddleware(AccessLogMiddleware(app, access))
    find_other = find_none if console is None else console.find_handler(relay)
    application.dispatcher = DataPlaneDispatcher(relay, find_other=find_other)
    if origins := settings.server.cors_origins:
        cors = CORSMiddleware(
            application.asgi,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # OpenAI's SDK sends a dozen of its own
            expose_headers=EXPOSED_HEADERS,
        )
        application.asgi = PreflightMiddleware(cors, access)
        application.dispatcher = DataPlaneDispatcher(relay, CorsHeaders(cors), find_other)


def _fastapi(
    routers: Iterable[APIRouter],
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


def _model_editor(
    application: Application, load: Callable[[str], Settings] | None
) -> ModelEditor | None:
    """Return what edits the configuration file; None: the operator has not allowed it."""
    file = application.settings.source.file
    if load is None or file is None or not application.settings.console.edit_configuration:
        return None
    return ModelEditor(
        ConfigurationFile(file), application.reloader, application.audit, load=load, shows=is_shown
    )


def _console(application: Application, editor: ModelEditor | None, acts: ActLimiter) -> Console:
    admission = application.admission
    return Console(
        authenticator=application.authenticator,
        acts=acts,
        secret=application.session_secret,
        database=application.database,
        limiter=application.limiter,
        catalogue=application.catalogue,
        key_store=application.key_store,
        owner_store=application.owner_store,
        audit=application.audit,
        capture_reader=application.capture_reader,
        requests=application.requests,
        model_rows=partial(model_rows, application.services, application.operations),
        draining=lambda: admission.draining,
        price_of=application.ledger.price_of,
        metrics=application.metrics,
        minutes=LoadMinutes(application.database, application.ledger.gateway),
        settings=lambda: application.settings,
        devices=application.fleet.builder.devices,
        in_flight=lambda: admission.in_flight,
        unused=application.servers.unused,
        gateways=application.count_gateways,
        root_path=application.settings.server.root_path,
        editor=editor,
    )


def _all_routers(
    console: Console | None,
    application: Application,
    metrics_pages: APIRouter | None,
    acts: ActLimiter,
) -> Iterator[APIRouter]:
    """Yield the routes of the console's pages and those of the API."""
    if console is not None:
        yield from console.routers()
    yield from _routers(application, metrics_pages, acts)


def _routers(
    application: Application, metrics_pages: APIRouter | None, acts: ActLimiter
) -> Iterator[APIRouter]:
    """Yield the routes of the API; `metrics_pages` is None where they have a port of their own."""
    authenticator, key_store = application.authenticator, application.key_store
    admission = application.admission
    client = require_client_key(authenticator, application.limiter, application.metrics)
    yield from _model_routers(application, client, acts)
    yield usage_router(
        partial(usage_report, application.database),
        client,
        RequireRight(authenticator, Right.USAGE_READ, scoped=True),
        lambda named, owner: key_store.within(owner).id_for_reports(named),
        currency=lambda: application.ledger.currency,
        capture=lambda caller: own_capture(application.services.bounds.capture, caller),
    )
    yield ops_router(application.services.forecasts, admission, authenticator)
    if metrics_pages is not None:
        yield metrics_pages
    yield keys_router(key_store, authenticator, application.catalogue)
    yield owners_router(application.owner_store, authenticator)
    yield reload_router(application.reloader, authenticator)
    yield logs_router(application.levels, authenticator, application.audit)
    yield requests_router(application.requests, key_store, authenticator, application.audit)
    yield audit_router(application.audit, authenticator)
    yield from captures_routers(application.capture_reader, key_store, authenticator)
    yield engines_router(
        application.catalogue,
        application.operations,
        authenticator,
        application.audit,
        lambda: admission.draining,
        application.count_gateways,
        application.servers.unused,
    )
    yield schema_router(authenticator, application.settings.server.root_path)


def _model_routers(
    application: Application, client: ClientKey, acts: ActLimiter
) -> Iterator[APIRouter]:
    """Yield the routes that list models, load and unload them."""
    services, operations = application.services, application.operations
    catalogue, loader = services.catalogue, services.loader
    load = _by_residency(loader, loader.load, operations.load)
    unload = _by_residency(loader, loader.unload, operations.unload)

    def row_of(model: Model) -> ModelRow:
        return model_row(model, services, operations)

    if application.settings.server.llama_cpp_models:
        yield models_router(catalogue, client, lambda model: status_of(row_of(model)))
        yield llama_cpp_router(
            catalogue, client, row_of, operations, application.audit, acts, load=load, unload=unload
        )
    else:
        yield models_router(catalogue, client)
    yield admin_models_router(
        services,
        operations,
        application.authenticator,
        application.audit,
        load=load,
        unload=unload,
    )


def _by_residency(
    loader: OnDemandLoader, on_demand: ModelAction, eager: ModelAction
) -> ModelAction:
    """Return one action for models on demand, and another for those that are always loaded."""

    async def act(model: str) -> None:
        await (on_demand if model in loader else eager)(model)

    return act
