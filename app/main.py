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

Every other request is FastAPI's; `app/http_application.py` has its way.

`create_app` starts nothing; `Application.run` starts and releases what it built.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.admission import Admission
from app.application import Application
from app.audit import AuditTrail
from app.auth import Authenticator, KeyStore, OwnerStore
from app.capture import CaptureReader, CaptureStore, CaptureWriter, Sealer
from app.concurrency import ConcurrencyTuner
from app.database import BackupSchedule, Database, SharedSecret
from app.discovery import FindSource, find_source
from app.fleet import (
    Builder,
    DetachedEngines,
    DiscoveredServers,
    EngineAlerts,
    EngineLifecycle,
    EnginesPage,
    Fleet,
    ModelOperations,
    adoptable_engines,
    build_models,
    eager_memory_gib,
    engine_figures,
    engine_states,
)
from app.http_application import add_http
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
from app.routing import Catalogue
from app.scaling import Autoscaler
from app.settings import AlertsSettings, InForce, Settings, StateSettings
from app.sharing import LoadSharing, load_sharing_on
from app.stored import StoredResponses
from app.telemetry import RecentRequests, TracedRequests
from app.telemetry.logs import AccessLog, DirectOutput, Levels, Output, is_json
from app.telemetry.metrics import Metrics, ScrapedValues
from app.telemetry.traces import tracer_for
from app.usage import Budgets, Ledger, RequestHistory
from app.usage.alerts import Alerts
from app.webhook import Webhook
from engines.base import EngineState
from engines.process import running_engines

if TYPE_CHECKING:  # OpenTelemetry is imported only where traces go somewhere
    from app.telemetry.traces.tracer import Tracer
if TYPE_CHECKING:  # imported only where access tokens are accepted
    from app.auth.tokens import TokenCallers

# The name of the secret that salts of the prefix cache are made from.
SALT_SECRET = "cache_salt"  # noqa: S105 - a name
# The name of the secret that seals sessions of the console and signs reports of load.
SESSION_SECRET = "console_session"  # noqa: S105 - a name


def create_app(
    settings: Settings,
    *,
    launcher: Sequence[str] | None = None,
    source: Callable[[], Settings] | None = None,
    source_of_text: Callable[[str], Settings] | None = None,
    tracer: "Tracer | None" = None,
    output: Output | None = None,
    find_source: FindSource = find_source,
) -> Application:
    """Build a gateway that is not started.

    `launcher` runs vLLM's server; default: this interpreter's vLLM. `source` reads the settings
    again for a reload; default: they stay as they are. `source_of_text` reads them with another
    text of the file; default: the file is not edited. `tracer` makes traces; default: as the
    settings say. `output` takes the access lines; default: standard error. `find_source` returns
    what lists discovered servers. Raises LauncherMissing, and ConfigError when the GPUs that
    engines ask for do not fit or the packages for traces are missing.
    """
    observers = _observers(settings, tracer, output or DirectOutput())
    stores = _stores(settings)
    in_force = InForce(settings)
    callers = _callers(in_force, stores, observers)
    engines = _engines(
        in_force,
        Builder(settings, launcher),
        find_source,
        observers,
        # A signature names its purpose, so one secret serves both.
        lambda: stores.session_secret.value,
    )
    services = _services(settings, stores, callers, engines, observers)
    application = _application(
        source or (lambda: settings), stores, callers, engines, services, observers
    )
    _watch(application, observers.output)
    relay = Relay(
        authenticator=application.authenticator,
        services=services,
        ledger=application.ledger,
        access=application.access,
        recorder=observers.recent,
    )
    add_http(application, relay, source_of_text)
    return application


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observers:
    """What is told of requests: metrics, logs and traces."""

    metrics: Metrics
    output: Output
    access: AccessLog
    levels: Levels
    tracer: "Tracer | None"
    recent: RecentRequests


def _observers(settings: Settings, tracer: "Tracer | None", output: Output) -> _Observers:
    if tracer is None:
        tracer = tracer_for(settings.traces)
    return _Observers(
        metrics=Metrics(),
        output=output,
        access=AccessLog(output, as_json=is_json(settings.logs)),
        levels=Levels(settings.logs),
        tracer=tracer,
        recent=RecentRequests() if tracer is None else TracedRequests(tracer),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stores:
    """The database, and what is read from it by a part of its own."""

    database: Database
    salt_secret: SharedSecret
    session_secret: SharedSecret
    key_store: KeyStore
    owner_store: OwnerStore
    audit: AuditTrail
    responses: StoredResponses
    captures: CaptureStore


def _stores(settings: Settings) -> _Stores:
    database = Database(settings.state.database_url.get_secret_value())
    return _Stores(
        database=database,
        salt_secret=SharedSecret(database, SALT_SECRET),
        session_secret=SharedSecret(database, SESSION_SECRET),
        key_store=KeyStore(database),
        owner_store=OwnerStore(database),
        audit=AuditTrail(database),
        responses=StoredResponses(database),
        captures=CaptureStore(database),
    )


def _backups(state: StateSettings, metrics: Metrics) -> BackupSchedule | None:
    if (chosen := state.backup) is None:
        return None
    return BackupSchedule(
        state.database_url.get_secret_value(),
        chosen.directory,
        every_s=chosen.every_h * 3600,
        keep=chosen.keep,
        count=lambda outcome: metrics.backups.add((outcome,)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Callers:
    """Who sends requests, what they may send, and what they have used."""

    in_flight: RequestsInFlight
    authenticator: Authenticator
    tokens: "TokenCallers | None"
    limiter: Limiter
    ledger: Ledger
    alerts: Alerts | None
    budgets: Budgets


def _token_callers(in_force: InForce, stores: _Stores) -> "TokenCallers | None":
    providers = in_force.settings.auth.jwt
    if not providers:
        return None
    from app.auth.tokens import TokenCallers

    return TokenCallers(
        providers, stores.owner_store, limits=lambda: in_force.settings.limits.default
    )


def _callers(in_force: InForce, stores: _Stores, observers: _Observers) -> _Callers:
    settings = in_force.settings
    database, metrics = stores.database, observers.metrics
    in_flight = RequestsInFlight()
    tokens = _token_callers(in_force, stores)
    prices = {name: price for model in settings.models for name, price in model.prices.items()}
    usage = settings.usage
    ledger = Ledger(database, metrics, prices, usage.retention_days, currency=usage.currency)
    alerts = None
    if settings.alerts.webhook_url is not None and "budgets" in settings.alerts.events:
        alerts = Alerts(
            settings.alerts, database, metrics, lambda: ledger.written,
            currency=lambda: ledger.currency,
        )  # fmt: skip
    return _Callers(
        in_flight=in_flight,
        authenticator=Authenticator(
            stores.key_store,
            static=settings.api_keys,
            admin=settings.admin_key,
            enabled=settings.auth.enabled,
            limits=settings.limits.default,
            offline_grace_s=settings.auth.offline_grace_s,
            on_cut=in_flight.end_requests,
            tokens=tokens,
        ),
        tokens=tokens,
        limiter=Limiter(settings.limits, settings.state, metrics),
        ledger=ledger,
        alerts=alerts,
        budgets=Budgets(database, ledger, listener=alerts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engines:
    """The engines of all models: who owns them, who waits for them, and who chooses among them."""

    in_force: InForce
    catalogue: Catalogue
    admission: Admission
    load_sharing: LoadSharing | None
    loader: OnDemandLoader
    fleet: Fleet
    servers: DiscoveredServers
    lifecycle: EngineLifecycle


def _engines(
    in_force: InForce,
    builder: Builder,
    find_source: FindSource,
    observers: _Observers,
    report_secret: Callable[[], bytes],
) -> _Engines:
    """Build the engines; `report_secret` returns what reports of load are signed with."""
    settings, metrics = in_force.settings, observers.metrics
    run_dir = settings.server.run_dir.absolute()
    left_running = running_engines(run_dir)
    deployments = build_models(settings, builder, left_running)
    catalogue = Catalogue([model for deployment in deployments for model in deployment.models()])
    queues = {model.name: model.queue for model in settings.models}
    admission = Admission(metrics, queues, catalogue.count_slots, catalogue.changes)
    detached = DetachedEngines()
    on_demand = (deployment.on_demand() for deployment in deployments)
    loader = OnDemandLoader(
        [model for model in on_demand if model is not None],
        metrics,
        engine_changes=catalogue.changes,
        budget_gib=settings.server.memory_budget_gib,
        fixed_gib=lambda: eager_memory_gib(catalogue) + detached.uncounted_gib,
        slots=settings.server.parallel_starts,
    )
    fleet = Fleet(
        in_force,
        deployments,
        builder,
        catalogue=catalogue,
        loader=loader,
        admission=admission,
        detached=detached,
    )
    servers = DiscoveredServers(fleet, find_source)
    adoptable = adoptable_engines(deployments, left_running)
    return _Engines(
        in_force=in_force,
        catalogue=catalogue,
        admission=admission,
        load_sharing=load_sharing_on(
            settings.state, catalogue, metrics, lambda: admission.draining, report_secret
        ),
        loader=loader,
        fleet=fleet,
        servers=servers,
        lifecycle=EngineLifecycle(
            catalogue,
            loader,
            metrics,
            run_dir,
            in_force,
            adoptable,
            servers.wait_until_settled,
        ),
    )


def _services(
    settings: Settings,
    stores: _Stores,
    callers: _Callers,
    engines: _Engines,
    observers: _Observers,
) -> RelayServices:
    """Return what the relay calls on the way of a request."""
    return RelayServices(
        limiter=callers.limiter,
        budgets=callers.budgets,
        admission=engines.admission,
        loader=engines.loader,
        catalogue=engines.catalogue,
        metrics=observers.metrics,
        bounds=RelayBounds.of(settings),
        body_memory=BodyMemory(memory_bounds(settings)),
        salts=CacheSalts(lambda: stores.salt_secret.value),
        stored=stores.responses,
        in_flight=callers.in_flight,
        captures=CaptureWriter(stores.captures, observers.metrics, callers.ledger.gateway),
        is_about_to_start=engines.lifecycle.is_about_to_start,
    )


def _application(
    source: Callable[[], Settings],
    stores: _Stores,
    callers: _Callers,
    engines: _Engines,
    services: RelayServices,
    observers: _Observers,
) -> Application:
    """Return the parts, before the HTTP that is served with them."""
    fleet, lifecycle, metrics = engines.fleet, engines.lifecycle, observers.metrics
    adjustable = Adjustable(services, callers.authenticator, callers.ledger, observers.levels)
    return Application(
        in_force=engines.in_force,
        services=services,
        catalogue=engines.catalogue,
        database=stores.database,
        key_store=stores.key_store,
        owner_store=stores.owner_store,
        audit=stores.audit,
        authenticator=callers.authenticator,
        tokens=callers.tokens,
        limiter=callers.limiter,
        load_sharing=engines.load_sharing,
        budgets=callers.budgets,
        ledger=callers.ledger,
        admission=engines.admission,
        loader=engines.loader,
        metrics=metrics,
        levels=observers.levels,
        access=observers.access,
        tracer=observers.tracer,
        fleet=fleet,
        servers=engines.servers,
        reloader=Reloader(
            fleet,
            engines.servers,
            adjustable,
            stores.audit,
            source=source,
            engines_tried=lifecycle.engines_tried,
        ),
        autoscaler=Autoscaler(fleet, engines.admission, lifecycle.startup_done),
        concurrency_tuner=ConcurrencyTuner(engines.catalogue, engines.admission),
        operations=ModelOperations(
            engines.catalogue, engines.in_force.settings.server.run_dir.absolute()
        ),
        engine_lifecycle=lifecycle,
        engines_page=EnginesPage(engines.catalogue, metrics),
        salt_secret=stores.salt_secret,
        session_secret=stores.session_secret,
        body_memory=services.body_memory,
        stored_responses=stores.responses,
        captures=stores.captures,
        capture_reader=CaptureReader(
            stores.captures, lambda: Sealer.of(engines.in_force.settings.capture)
        ),
        in_flight=callers.in_flight,
        requests=RequestDirectory(
            callers.in_flight,
            observers.recent,
            RequestHistory(stores.database),
            callers.ledger.gateway,
        ),
        alerts=callers.alerts,
        engine_alerts=_engine_alerts(engines.in_force.settings.alerts, engines.catalogue, metrics),
        backups=_backups(engines.in_force.settings.state, metrics),
    )


def _engine_alerts(
    settings: AlertsSettings, catalogue: Catalogue, metrics: Metrics
) -> EngineAlerts | None:
    if settings.webhook_url is None or "engines" not in settings.events:
        return None
    return EngineAlerts(Webhook(settings), catalogue, metrics)


def _watch(application: Application, output: Output) -> None:
    """Have the metrics read at each scrape what the parts know."""
    values = ScrapedValues(application.metrics)
    catalogue, admission = application.catalogue, application.admission
    if application.tracer is not None:
        values.watch_spans(application.tracer.counts)
    values.watch_log(lambda: output.lost)
    engines = application.metrics.engines
    engines.watch_states(lambda: engine_states(catalogue), [str(s) for s in EngineState])
    engines.watch_figures(lambda: engine_figures(catalogue))
    values.watch_discovery(application.servers.counts)
    values.watch_queues(admission.queue_limits)
    values.watch_fairness(admission.fairness)
    values.watch_scaling(application.autoscaler.wanted)
    values.watch_concurrency(application.concurrency_tuner.targets)
    values.watch_in_flight(admission.in_flight_by_model)
    values.watch_budgets(application.budgets.usage_levels)
    values.watch_ledger(lambda: application.ledger.pending)
    values.watch_loop(application.loop_lag.read)
    values.watch_models(lambda: ((model.name, model.on_demand) for model in catalogue.models))
