"""Routes of the console that are not a page of their own: login, logout, files, live regions."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from app.api import ActLimiter, client_address
from app.audit import Action, Actor, AuditRecord, AuditTrail
from app.auth import Principal, Role
from app.console import language as languages
from app.console import theme as themes
from app.console.guard import LOGIN, VISITOR
from app.console.language import noop
from app.console.live import Drain, LiveResponse, LiveSource
from app.console.next_path import next_path
from app.console.rendering import HEADERS, STATIC_TYPES, Renderer
from app.console.session import LIFETIME_S
from app.console.sign_in import (
    COOKIE,
    SignIn,
    check_same_origin,
    is_over_tls,
    set_console_cookie,
    theme_of,
)
from app.console.visitor import CONSOLE, Visitor, page_at
from app.errors import (
    GatewayError,
    InvalidApiKey,
    PermissionDenied,
    RouteNotFound,
    ServiceUnavailable,
)
from app.telemetry.metrics import Metrics

if TYPE_CHECKING:  # imported only where people sign in by an identity provider
    from app.console.oidc_sign_in import OidcSignIn

_IMMUTABLE = {"cache-control": "public, max-age=31536000, immutable"}


def visitor_of(request: Request) -> Visitor:
    """Return the visitor of a request, which the guard has found."""
    visitor: Visitor = request.scope[VISITOR]
    return visitor


@dataclass(frozen=True, slots=True)
class Frame:
    """What all pages need: login and logout, static files and live regions."""

    sign_in: SignIn
    renderer: Renderer
    # Pages with live regions, by name.
    live: Mapping[str, LiveSource]
    drain: Drain
    metrics: Metrics
    # Stands before the paths that a browser knows.
    root_path: str
    audit: AuditTrail
    oidc: "OidcSignIn | None"  # None: there are keys only
    acts: ActLimiter

    async def static_file(self, request: Request, version: str, name: str) -> Response:
        """A file of the pages. Its URL changes with its content."""
        found = self.renderer.static_files.get(name)
        if found is None:
            raise RouteNotFound("there is no such file here")
        content, compressed = found
        headers = {**HEADERS, "vary": "accept-encoding"}
        if version == self.renderer.version:
            headers |= _IMMUTABLE
        if "gzip" in request.headers.get("accept-encoding", ""):
            content = compressed
            headers["content-encoding"] = "gzip"
        return Response(content, headers=headers, media_type=STATIC_TYPES[name[name.rfind(".") :]])

    async def show_login(self, request: Request) -> Response:
        target = next_path(request.query_params.get("next", ""), self.root_path)
        return self.renderer.login(theme_of(request.scope["headers"]), next_path=target)

    async def log_in(
        self, request: Request, key: Annotated[str, Form()] = "", next: Annotated[str, Form()] = ""
    ) -> Response:
        """Begin a session, for any key."""
        target = next_path(next, self.root_path)
        try:
            check_same_origin(request.scope["headers"])
            principal, cookie = await self.sign_in.sign_in(key)
            await self._record(request, principal, Action.SESSION_SIGN_IN)
        except GatewayError as error:
            fault = error.message
            if isinstance(error, InvalidApiKey):
                self.metrics.auth_failures.add((error.reason,))
                fault = noop("This key is not valid here: it is unknown, disabled or has expired.")
            theme = theme_of(request.scope["headers"])
            return self.renderer.login(theme, next_path=target, fault=fault, status=error.status)
        response = RedirectResponse(target, 303, HEADERS)
        self._set_cookie(response, request, COOKIE, cookie, LIFETIME_S)
        return response

    def _set_cookie(
        self, response: Response, request: Request, name: str, value: str, lifetime_s: int
    ) -> None:
        secure = is_over_tls(request.scope)
        set_console_cookie(
            response, name, value, lifetime_s, root_path=self.root_path, secure=secure
        )

    async def log_out(self, request: Request) -> Response:
        """End the session in this browser, also one that has ended with its key."""
        check_same_origin(request.scope["headers"])
        page: Response | None = None
        with contextlib.suppress(InvalidApiKey, ServiceUnavailable):
            visitor = await self.sign_in.find_visitor(request.scope["headers"])
            if visitor.logged_in:
                await self._record(
                    request, visitor.principal, Action.SESSION_SIGN_OUT, visitor.is_person
                )
            if self.oidc is not None and visitor.is_person:
                page = await self.oidc.sign_out_page(request)
        response = page or RedirectResponse(LOGIN, 303, HEADERS)
        response.delete_cookie(
            COOKIE, path=self.root_path + CONSOLE, httponly=True, samesite="strict"
        )
        return response

    async def _record(
        self, request: Request, principal: Principal, action: Action, is_person: bool = False
    ) -> None:
        """Record a session of a person or an operator.

        Of keys of clients there may be any number: they change nothing.

        While the database is away, sessions begin nevertheless: what they change is recorded.
        Raises RateLimited.
        """
        if principal.role is not Role.CLIENT or is_person:
            self.acts.check(principal)
            actor = Actor(principal.id, principal.role, client_address(request.scope))
            await self.audit.record(AuditRecord(actor=actor, action=action, target="console"))

    async def choose_theme(self, request: Request, theme: Annotated[str, Form()]) -> Response:
        """Keep the color scheme of this browser, and return to the page that was open."""
        return self._keep_choice(
            request, themes.COOKIE, themes.theme_named(theme), themes.LIFETIME_S
        )

    async def choose_language(self, request: Request, language: Annotated[str, Form()]) -> Response:
        """Keep the language of this browser, and return to the page that was open."""
        chosen = languages.chosen_language(language, "")
        return self._keep_choice(request, languages.COOKIE, chosen, languages.LIFETIME_S)

    def _keep_choice(self, request: Request, cookie: str, value: str, lifetime_s: int) -> Response:
        check_same_origin(request.scope["headers"])
        try:
            page = urlsplit(request.headers.get("referer", ""))
        except ValueError:  # no URL, such as http://[
            page = urlsplit("")
        target = f"{page.path}?{page.query}" if page.query else page.path
        response = RedirectResponse(next_path(target, self.root_path), 303, HEADERS)
        self._set_cookie(response, request, cookie, value, lifetime_s)
        return response

    async def show_session(self, request: Request) -> dict[str, str]:
        """Who is logged in; the guard answers 401 once the session has ended."""
        visitor = visitor_of(request)
        return {"role": visitor.role, "key_id": visitor.principal.id}

    async def events(self, request: Request, page: str) -> Response:
        """The live regions of a page."""
        visitor, shown = visitor_of(request), page_at(f"{CONSOLE}/{page}")
        if shown is None or page not in self.live:
            raise RouteNotFound("there is no such page here")
        if not shown.may_see(visitor):
            raise PermissionDenied(f"the role {visitor.role} does not see this page")
        headers = request.scope["headers"]

        async def check_session() -> None:
            await self.sign_in.find_again(headers, visitor)

        regions = self.live[page].for_visitor(visitor)
        return LiveResponse(regions, visitor.principal.id, check_session, self.drain)

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(prefix=CONSOLE, include_in_schema=False)
        router.get("/static/{version}/{name:path}")(self.static_file)
        router.get("/login")(self.show_login)
        router.post("/login")(self.log_in)
        router.post("/logout")(self.log_out)
        router.post("/theme")(self.choose_theme)
        router.post("/language")(self.choose_language)
        router.get("/api/session")(self.show_session)
        router.get("/api/events/{page}")(self.events)
        return router
