"""The parts of one running gateway, started in order and released in the reverse order.

`run` is the lifespan. Each part is pushed onto one `AsyncExitStack` where it is started, so that a
failed start releases what had been started, and a canceled shutdown still releases the rest.
The order of the release:

    event loop lag, tuning, scaling,      no engine is started any more, except by a reload or
    start of engines                      an operation
    engines page, servers, reloader,      closed
    engines that have left
    operations, loader                    closed: from now on nothing starts an engine
    engines                               stopped, or released to the next gateway
    engine alerts                         their task canceled; what is not delivered is lost
    load sharing                          its task canceled; then the other gateways are told
    limiter                               queued releases sent; then its task is canceled
    ledger                                waiting records written; then its task is canceled
    budgets                               closed
    captures                              waiting ones written; then their tasks are canceled
    alerts                                closed; then their task is canceled
    keys                                  polling task canceled; then closed
    stored responses, shared secrets      tasks canceled
    database                              closed: everything above may write
    tracer                                last spans exported
    access log                            flushed
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from app.admission import Admission
from app.asgi import Dispatcher
from app.audit import AuditTrail
from app.auth import Authenticator, KeyStore, OwnerStore
from app.capture import CaptureReader, CaptureStore
from app.concurrency import ConcurrencyTuner
from app.database import BackupSchedule, Database, DatabaseUnavailable, SharedSecret
from app.fleet import (
    DiscoveredServers,
    EngineAlerts,
    EngineLifecycle,
    EnginesPage,
    Fleet,
    ModelOperations,
)
from app.limits import Limiter
from app.relay import RelayServices, RequestDirectory, RequestsInFlight
from app.reload import Reloader
from app.request_body import BodyMemory
from app.residency import OnDemandLoader
from app.routing import Catalogue
from app.scaling import Autoscaler
from app.settings import InForce, Settings
from app.sharing import LoadSharing
from app.stored import StoredResponses
from app.telemetry.logs import AccessLog, Levels
from app.telemetry.metrics import EventLoopLag, Metrics
from app.usage import Budgets, ClockSteps, Ledger
from app.usage.alerts import Alerts

if TYPE_CHECKING:  # imported only where access tokens are accepted
    from app.auth.tokens import TokenCallers
if TYPE_CHECKING:  # OpenTelemetry is imported only where traces go somewhere
    from app.telemetry.traces.tracer import Tracer

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Application:
    """The parts of a running gateway; `app.main.create_app` builds them."""

    in_force: InForce
    services: RelayServices
    catalogue: Catalogue
    database: Database
    key_store: KeyStore
    owner_store: OwnerStore
    audit: AuditTrail
    authenticator: Authenticator
    tokens: "TokenCallers | None"
    limiter: Limiter
    load_sharing: LoadSharing | None
    budgets: Budgets
    ledger: Ledger
    admission: Admission
    loader: OnDemandLoader
    metrics: Metrics
    levels: Levels
    access: AccessLog
    tracer: "Tracer | None"
    fleet: Fleet
    servers: DiscoveredServers
    reloader: Reloader
    autoscaler: Autoscaler
    concurrency_tuner: ConcurrencyTuner
    operations: ModelOperations
    engine_lifecycle: EngineLifecycle
    engines_page: EnginesPage
    salt_secret: SharedSecret
    session_secret: SharedSecret
    body_memory: BodyMemory
    stored_responses: StoredResponses
    captures: CaptureStore
    capture_reader: CaptureReader
    in_flight: RequestsInFlight
    requests: RequestDirectory
    alerts: Alerts | None
    engine_alerts: EngineAlerts | None
    backups: BackupSchedule | None
    loop_lag: EventLoopLag = field(default_factory=EventLoopLag)
    # What the server serves: the data plane without ASGI, and FastAPI for everything else.
    dispatcher: Dispatcher = field(init=False)
    asgi: ASGIApp = field(init=False)
    # FastAPI's routes, from which the OpenAPI document is made.
    routes: Sequence[BaseRoute] = field(init=False)
    # Connections wait already when the gateway starts: none is accepted before the engines that run
    # are found.
    waits_for_engines: bool = False
    # What the metrics' own port serves; None: metrics are on the main port.
    metrics_asgi: ASGIApp | None = None

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self.in_force.settings

    @property
    def startup_done(self) -> asyncio.Event:
        """Set when an engine is READY, or none will be by a restart."""
        return self.engine_lifecycle.startup_done

    def count_gateways(self) -> int | None:
        """Return the number of gateways that share engines; None: load is not shared."""
        sharing = self.load_sharing
        return None if sharing is None or not sharing.available else sharing.gateways

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Start every part, and release them all at the end."""
        async with AsyncExitStack() as stack:
            stack.callback(self.access.flush)
            if self.tracer is not None:
                self.tracer.start()
                stack.push_async_callback(self.tracer.close)
            stack.push_async_callback(self.database.close)  # also where opening it is cut short
            await self.database.open()
            for secret in (self.salt_secret, self.session_secret):
                with contextlib.suppress(DatabaseUnavailable):  # `run` tries again
                    await secret.load()
                _run_until_release(stack, secret.run(), "load a shared secret")
            _run_until_release(stack, self.stored_responses.run(), "delete expired response owners")
            retention_days = self.settings.audit.retention_days
            _run_until_release(stack, self.audit.run(retention_days), "delete old audit records")
            if self.backups is not None:
                _run_until_release(stack, self.backups.run(), "make backups")
            if self.tokens is not None:
                stack.push_async_callback(self.tokens.close)
                _run_until_release(stack, self.tokens.run(), "fetch public keys")
            stack.push_async_callback(self.authenticator.close)
            _run_until_release(stack, self.authenticator.run(), "poll the key store")
            if self.alerts is not None:
                _run_until_release(stack, self.alerts.run(), "alerts")
                stack.push_async_callback(self.alerts.close)
            stack.push_async_callback(self.budgets.close)
            _run_until_release(stack, self.captures.run(), "delete expired captures")
            writer = self.services.captures
            _run_until_release(stack, writer.run(), "write captures")
            stack.push_async_callback(writer.close)
            _run_until_release(stack, self.ledger.run(), "write usage")
            _run_until_release(stack, ClockSteps().run(), "watch the clock")
            stack.push_async_callback(self.ledger.close)
            _run_until_release(stack, self.limiter.run(), "keep leases")
            stack.push_async_callback(self.limiter.close)
            if self.load_sharing is not None:
                stack.push_async_callback(self.load_sharing.close)
                _run_until_release(stack, self.load_sharing.run(), "share load")
            await self._log_missing_key()
            if self.engine_alerts is not None:
                _run_until_release(stack, self.engine_alerts.run(), "engine alerts")
            stack.push_async_callback(self.engine_lifecycle.stop_engines)
            self.loader.start()
            stack.push_async_callback(self.loader.close)
            stack.push_async_callback(self.operations.close)
            stack.push_async_callback(self.fleet.close)
            stack.push_async_callback(self.reloader.stop)
            self.servers.start()
            stack.push_async_callback(self.servers.close)
            stack.push_async_callback(self.engines_page.close)
            self.engine_lifecycle.start()
            stack.push_async_callback(self.engine_lifecycle.cancel_start)
            _run_until_release(stack, self.autoscaler.run(), "scale models")
            _run_until_release(stack, self.concurrency_tuner.run(), "tune the requests in flight")
            if self.waits_for_engines:
                await self.engine_lifecycle.wait_for_running_engines()
            self.loop_lag.start(self.metrics.count_observed)
            stack.callback(self.loop_lag.stop)
            yield

    async def _log_missing_key(self) -> None:
        """Log how to make a key if there is none that a client could use."""
        auth = self.settings.auth
        if auth.enabled and not auth.jwt and not self.settings.api_keys:
            with contextlib.suppress(DatabaseUnavailable):
                if not await self.key_store.has_client():
                    log.info("no client key yet: vllm-gateway keys create --name NAME")


def _run_until_release(
    stack: AsyncExitStack, coroutine: Coroutine[object, object, None], name: str
) -> None:
    """Run a coroutine in a task that the stack cancels."""
    task = asyncio.create_task(coroutine, name=name)

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)
