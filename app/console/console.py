"""Builds the console from the parts of the gateway."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fastapi import APIRouter
from starlette.types import ASGIApp

from app.asgi import ExchangeHandler
from app.auth import Authenticator, KeyStore, OwnerStore
from app.console.guard import ConsoleGuard
from app.console.key_names import KeyNames
from app.console.keys import KeyPages, keys_pages
from app.console.markdown_process import MarkdownProcess
from app.console.overview import ModelRows, live_overview, overview_router
from app.console.playground import PlaygroundHandlers
from app.console.playground_page import PriceOf, playground_router
from app.console.rendering import Renderer
from app.console.requests_page import requests_page_router
from app.console.router import frame_router
from app.console.sign_in import SessionCallers, SignIn
from app.database import SharedSecret
from app.relay import Relay, RequestDirectory
from app.routing import Catalogue


@dataclass(slots=True, kw_only=True)
class Console:
    """The console of one gateway."""

    authenticator: Authenticator
    secret: SharedSecret
    catalogue: Catalogue
    key_store: KeyStore
    requests: RequestDirectory
    model_rows: ModelRows
    draining: Callable[[], bool]
    price_of: PriceOf
    owner_store: OwnerStore
    _renderer: Renderer = field(init=False, default_factory=Renderer)
    _markdown: MarkdownProcess = field(init=False, default_factory=MarkdownProcess)
    _sign_in: SignIn = field(init=False)

    def __post_init__(self) -> None:
        self._sign_in = SignIn(self.authenticator, self.secret)

    def routers(self) -> list[APIRouter]:
        """Return the routes of all pages."""
        renderer = self._renderer
        live = {"overview": live_overview(renderer, self.catalogue, self.model_rows)}
        return [
            frame_router(self._sign_in, renderer, live, self.draining),
            overview_router(renderer, self.catalogue, self.model_rows),
            requests_page_router(renderer, self.requests, KeyNames(self.key_store), self.catalogue),
            playground_router(renderer, self.catalogue, self.price_of, self._markdown),
            keys_pages(self._key_pages()),
        ]

    def _key_pages(self) -> KeyPages:
        return KeyPages(
            self._renderer,
            self.key_store,
            self.owner_store,
            self.authenticator,
            self.catalogue,
        )

    def guard(self, app: ASGIApp) -> ConsoleGuard:
        """Return the middleware that everything under /console passes."""
        return ConsoleGuard(app, self._sign_in, self._renderer)

    def find_handler(self, relay: Relay) -> Callable[[str], ExchangeHandler | None]:
        """Return how requests of the playground find their handler; they take `relay`'s way."""
        callers = SessionCallers(self._sign_in)
        return PlaygroundHandlers(replace(relay, authenticator=callers)).find_handler

    async def aclose(self) -> None:
        """End the processes of the console."""
        await self._markdown.aclose()
