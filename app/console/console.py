"""Builds the console from the parts of the gateway."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fastapi import APIRouter
from starlette.types import ASGIApp

from app.api import ActLimiter
from app.asgi import ExchangeHandler
from app.audit import AuditTrail
from app.auth import Authenticator, KeyStore, OwnerStore
from app.capture import CaptureReader
from app.console.account_page import AccountPages, account_pages
from app.console.audit_page import AuditPages
from app.console.capture_page import CapturePages
from app.console.configuration_page import configuration_pages
from app.console.devices import MemoryReader
from app.console.engines_page import engines_router, live_engines
from app.console.events import EventLog
from app.console.first_steps import FirstSteps
from app.console.fleet_view import FleetViews, ModelRows, UnusedServers
from app.console.guard import ConsoleGuard
from app.console.history import History, Load
from app.console.key_names import KeyNames
from app.console.keys import KeyPages, keys_pages
from app.console.live import Drain, LiveSource
from app.console.local_models import LocalModels
from app.console.memory_plans import MemoryPlans
from app.console.minutes import MinuteRecorder
from app.console.model_activity import ModelActivities
from app.console.model_edit_page import ModelEditPages, model_edit_pages
from app.console.models_page import live_models, models_router
from app.console.models_table import ModelTable
from app.console.overview import Overview, live_overview, overview_router
from app.console.own_keys import OwnKeyPages
from app.console.owner_page import OwnerPages, owner_pages
from app.console.playground import PlaygroundHandlers
from app.console.playground_page import PriceOf, playground_router
from app.console.quick_find import QuickFind, find_router
from app.console.remote_models import RemoteModels
from app.console.rendering import Renderer
from app.console.request_regions import RequestRegions
from app.console.requests_page import RequestPages
from app.console.router import Frame
from app.console.sign_in import SessionCallers, SignIn
from app.console.usage_page import UsagePages, usage_pages
from app.database import Database, SharedSecret
from app.limits import Limiter
from app.relay import Relay, RequestDirectory
from app.reload import ModelEditor
from app.routing import Catalogue
from app.settings import Settings
from app.telemetry.metrics import Metrics
from app.usage import LoadMinutes
from engines.gpu import Device

if TYPE_CHECKING:  # imported only where people sign in by an identity provider
    from app.auth.oidc import PersonSessions
    from app.console.oidc_sign_in import OidcSignIn


@dataclass(slots=True, kw_only=True)
class Console:
    """The console of one gateway."""

    authenticator: Authenticator
    acts: ActLimiter
    secret: SharedSecret
    database: Database
    limiter: Limiter
    catalogue: Catalogue
    key_store: KeyStore
    requests: RequestDirectory
    model_rows: ModelRows
    draining: Callable[[], bool]
    price_of: PriceOf
    owner_store: OwnerStore
    audit: AuditTrail
    capture_reader: CaptureReader
    metrics: Metrics
    minutes: LoadMinutes
    # Those in force.
    settings: Callable[[], Settings]
    # Blocks.
    devices: Callable[[], Sequence[Device]]
    in_flight: Callable[[], int]
    # Discovered servers that get no requests.
    unused: UnusedServers
    # Stands before the paths that a browser knows.
    root_path: str
    # Number of gateways that share engines; None: load is not shared.
    gateways: Callable[[], int | None]
    # None: models are edited in the file alone.
    editor: ModelEditor | None
    _renderer: Renderer = field(init=False)
    _sign_in: SignIn = field(init=False)
    _oidc: "OidcSignIn | None" = field(init=False)
    _names: KeyNames = field(init=False)
    _views: FleetViews = field(init=False)
    _history: History = field(init=False)
    _memory: MemoryReader = field(init=False)
    _plans: MemoryPlans = field(init=False)
    _events: EventLog = field(init=False)
    _activities: ModelActivities = field(init=False)
    _drain: Drain = field(init=False)
    _sampling: list[asyncio.Task[None]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        chosen = self.settings().console
        self._renderer = Renderer(
            lambda: self.settings().usage.currency or "",
            self.root_path,
            edits_models=self.editor is not None,
            key_sign_in=chosen.key_sign_in,
            provider="" if chosen.oidc is None else urlsplit(chosen.oidc.issuer).netloc,
        )
        people = self._person_sessions()
        self._sign_in = SignIn(
            self.authenticator, self.secret, with_keys=chosen.key_sign_in, people=people
        )
        self._oidc = None if people is None else self._oidc_sign_in(people)
        self._names = KeyNames(self.key_store)
        self._views = FleetViews(
            catalogue=self.catalogue,
            model_rows=self.model_rows,
            settings=self.settings,
            unused=self.unused,
            gateways=self.gateways,
        )
        self._history = History(self.metrics, self._load)
        self._memory = MemoryReader(self.devices)
        self._plans = MemoryPlans(self.devices)
        self._events = EventLog(self.catalogue)
        self._activities = ModelActivities(self.metrics, self.requests)
        self._drain = Drain(self.draining, self.catalogue.changes)

    def _person_sessions(self) -> "PersonSessions | None":
        settings = self.settings()
        if settings.console.oidc is None:
            return None
        from app.auth.oidc import PersonSessions

        return PersonSessions(
            settings.console.oidc,
            self.database,
            self.owner_store,
            limits=lambda: self.settings().limits.default,
            grace_s=settings.auth.offline_grace_s,
        )

    def _oidc_sign_in(self, people: "PersonSessions") -> "OidcSignIn":
        from app.auth.oidc import RelyingParty
        from app.console.oidc_sign_in import OidcSignIn

        return OidcSignIn(
            RelyingParty(people.settings),
            people,
            self._sign_in,
            self._renderer,
            self.secret,
            self.audit,
            self.metrics,
            self.acts,
            self.root_path,
        )

    def _load(self) -> Load:
        return Load(self.in_flight(), self.requests.answer_tokens().total())

    def routers(self) -> Iterator[APIRouter]:
        """Yield the routes of all pages."""
        renderer = self._renderer
        table = ModelTable(self._views, self._activities.of)
        overview = Overview(self._views, table, self._history, self._memory, self._events)
        steps = FirstSteps(self.catalogue, self.key_store, self.requests, self.settings)
        live: dict[str, LiveSource] = {
            "overview": live_overview(renderer, overview),
            "models": live_models(renderer, table),
            "engines": live_engines(renderer, self._views),
        }
        yield Frame(
            self._sign_in,
            renderer,
            live,
            self._drain,
            self.metrics,
            self.root_path,
            self.audit,
            self._oidc,
            self.acts,
        ).router()
        if self._oidc is not None:
            yield self._oidc.router()
        yield from self._own_key_routers()
        yield find_router(QuickFind(self.catalogue, self.key_store, self.requests))
        yield overview_router(renderer, overview, self.minutes, steps)
        yield models_router(renderer, self._views, table, self._plans)
        yield engines_router(renderer, self._views)
        yield self._request_pages().router()
        yield self._capture_pages().router()
        yield playground_router(renderer, self.catalogue, self.price_of)
        yield keys_pages(self._key_pages())
        yield owner_pages(self._owner_pages())
        yield account_pages(self._account_pages())
        yield AuditPages(renderer, self.audit).router()
        yield configuration_pages(renderer, self.settings)
        yield usage_pages(UsagePages(renderer, self.database, self.key_store, self.catalogue))
        if self.editor is not None:
            yield model_edit_pages(
                ModelEditPages(
                    renderer,
                    self.editor,
                    self._plans,
                    self._views,
                    LocalModels(self.settings),
                    RemoteModels(),
                )
            )

    def _request_pages(self) -> RequestPages:
        regions = RequestRegions(self._renderer, self.requests, self._names)
        return RequestPages(
            self._renderer,
            self.requests,
            self.catalogue,
            self._names,
            regions,
            self.audit,
            self._capture_pages(),
            self.acts,
        )

    def _capture_pages(self) -> CapturePages:
        return CapturePages(self._renderer, self.capture_reader)

    def _key_pages(self) -> KeyPages:
        return KeyPages(
            self._renderer,
            self.key_store,
            self.owner_store,
            self.authenticator,
            self.catalogue,
            self.database,
        )

    def _own_key_routers(self) -> list[APIRouter]:
        oidc = self.settings().console.oidc
        if oidc is None or oidc.own_keys is None:
            return []
        return OwnKeyPages(
            self._renderer, self.key_store, self.authenticator, oidc, oidc.own_keys, self.acts
        ).routers()

    def _owner_pages(self) -> OwnerPages:
        return OwnerPages(
            renderer=self._renderer,
            database=self.database,
            keys=self.key_store,
            owners=self.owner_store,
            authenticator=self.authenticator,
        )

    def _account_pages(self) -> AccountPages:
        return AccountPages(
            renderer=self._renderer,
            database=self.database,
            keys=self.key_store,
            limiter=self.limiter,
            catalogue=self.catalogue,
        )

    def guard(self, app: ASGIApp) -> ConsoleGuard:
        """Return the middleware that everything under /console passes."""
        return ConsoleGuard(app, self._sign_in, self._renderer, self._names, self.root_path)

    def find_handler(self, relay: Relay) -> Callable[[str], ExchangeHandler | None]:
        """Return how requests of the playground find their handler; they take `relay`'s way."""
        callers = SessionCallers(self._sign_in)
        return PlaygroundHandlers(replace(relay, authenticator=callers)).find_handler

    def start(self) -> None:
        """Begin to read the counters for the charts."""
        recorder = MinuteRecorder(self._history, self.minutes)
        self._sampling = [
            asyncio.create_task(self._history.run(), name="history of the console"),
            asyncio.create_task(recorder.run(), name="minutes of the console"),
            asyncio.create_task(self._events.run(), name="events of the console"),
            asyncio.create_task(self._activities.run(), name="models of the console"),
        ]
        if (oidc := self._oidc) is not None:
            self._sampling += [
                asyncio.create_task(oidc.party.run(), name="fetch the provider's keys"),
                asyncio.create_task(oidc.people.run(), name="delete old sessions"),
            ]

    async def aclose(self) -> None:
        """End the tasks of the console."""
        for task in self._sampling:
            task.cancel()
        await asyncio.gather(*self._sampling, return_exceptions=True)
        if self._oidc is not None:
            await self._oidc.party.close()
        await self._drain.aclose()
        await self._memory.aclose()
        await self._plans.aclose()
        if self.editor is not None:
            await self.editor.aclose()
