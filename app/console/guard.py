"""The guard of the console: sessions, forged requests, and the way to the API.

Everything under /console passes here before FastAPI. The login page and static files are open.
Pages need a session whose role may see them. `/console/api` is the API for the scripts of pages: a
request with a session is passed on to the same path without that prefix, with the session's caller
in place of a key, so that a page can do what its key can do, and nothing else. The cookie means
nothing outside of /console.
"""

from collections.abc import Awaitable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from urllib.parse import quote

from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import (
    MAX_BODY_BYTES,
    SESSION_CALLER,
    SESSION_CHECK,
    bound_body,
    error_response,
    notes_of,
)
from app.console.key_names import KeyNames
from app.console.language import gettext, in_language
from app.console.rendering import HEADERS, Renderer
from app.console.sign_in import (
    SignIn,
    check_request_token,
    check_same_origin,
    language_of,
)
from app.console.visit_limits import VisitLimits
from app.console.visitor import CONSOLE, Visitor, page_at, pages_of
from app.errors import GatewayError, InvalidApiKey, PermissionDenied, RouteNotFound

API = f"{CONSOLE}/api"
LOGIN = f"{CONSOLE}/login"
LOGOUT = f"{CONSOLE}/logout"
OIDC_PATHS = (f"{LOGIN}/oidc", f"{LOGIN}/oidc/callback", f"{LOGOUT}/oidc")
THEME = f"{CONSOLE}/theme"
LANGUAGE = f"{CONSOLE}/language"
STATIC = f"{CONSOLE}/static/"
# They check by themselves that a page of this gateway has sent them.
_OPEN = frozenset({LOGIN, LOGOUT, THEME, LANGUAGE, *OIDC_PATHS})
# The scope key of the visitor, for pages.
VISITOR = "gateway.visitor"
# The gateway's API; everything else below /console/api is the console's own.
_GATEWAY_API = ("/admin/", "/v1/models", "/v1/usage")
# The longest access token, and the path to return to.
MAX_FORM_BYTES = 12_288
_SAFE = frozenset({"GET", "HEAD"})
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class ConsoleGuard:
    """Finds the visitor of each request under /console, and what it may reach. Pure ASGI."""

    def __init__(
        self,
        app: ASGIApp,
        sign_in: SignIn,
        renderer: Renderer,
        names: KeyNames,
        root_path: str,
    ) -> None:
        """`root_path` stands before the paths that a browser knows."""
        self._app = app
        self._sign_in = sign_in
        self._renderer = renderer
        self._names = names
        self._limits = VisitLimits()
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == CONSOLE or path.startswith(f"{CONSOLE}/")):
            if path == "/" and _is_browser(scope):
                await RedirectResponse(self._root_path + CONSOLE, 303, HEADERS)(
                    scope, receive, send
                )
                return
            await self._app(scope, receive, send)
            return
        send = _with_headers(send, self._root_path)
        await self._renderer.load()
        receive = bound_body(receive, MAX_FORM_BYTES if path in _OPEN else MAX_BODY_BYTES)
        with in_language(language_of(scope["headers"])):
            await self._serve(path, scope, receive, send)

    async def _serve(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if path in _OPEN or path.startswith(STATIC):
            await self._app(scope, receive, send)
            return
        in_api = path.startswith(f"{API}/")
        app: ASGIApp = self._app
        with ExitStack() as stack:
            try:
                visitor = await self._sign_in.find_visitor(scope["headers"])
                notes_of(scope).key_id = visitor.principal.id
                self._limits.count(visitor)
                if not in_api:
                    visitor = await self._named(visitor)
                scope[VISITOR] = visitor
                _check_origin(scope, visitor, in_api=in_api)
                if in_api:
                    self._enter_api(scope, visitor)
                else:
                    stack.enter_context(self._limits.render(visitor))
                    app = self._check_page(scope, visitor) or self._app
            except InvalidApiKey as error:
                app = error_response(error, scope) if in_api else _to_login(scope)
            except GatewayError as error:
                app = error_response(error, scope)
            await app(scope, receive, send)

    async def _named(self, visitor: Visitor) -> Visitor:
        """Return the visitor with the name of its key."""
        if visitor.is_person:
            return visitor
        key_id = visitor.principal.id
        return replace(visitor, name=(await self._names.find((key_id,)))[key_id])

    def _check_page(self, scope: Scope, visitor: Visitor) -> Response | None:
        """Return the response to a page that the visitor does not see; None: it is served."""
        path = scope["path"]
        if path.rstrip("/") == CONSOLE:
            pages = pages_of(visitor)
            return RedirectResponse(pages[0].path, 303)
        page = page_at(path)
        if page is None:
            return self._renderer.fault(
                visitor, RouteNotFound(gettext("There is no page %(path)s here.", path=path))
            )
        if not page.may_see(visitor):
            fault = gettext("The role %(role)s does not see this page.", role=visitor.role)
            return self._renderer.fault(visitor, PermissionDenied(fault))
        return None

    def _enter_api(self, scope: Scope, visitor: Visitor) -> None:
        """Give a request for the gateway's API its path there. Raises PermissionDenied."""
        path: str = scope["path"].removeprefix(API)
        if not path.startswith(_GATEWAY_API):
            return
        if path.startswith("/v1/") and not visitor.may_chat:
            raise PermissionDenied(f"the role {visitor.role} may not use models")
        scope["path"] = path
        scope["raw_path"] = quote(path).encode()
        scope[SESSION_CALLER] = visitor.principal
        scope[SESSION_CHECK] = partial(self._sign_in.find_again, scope["headers"], visitor)


def _check_origin(scope: Scope, visitor: Visitor, *, in_api: bool) -> None:
    """Check that a page of this session sends what may change something.

    A form has no header for the token. Raises PermissionDenied.
    """
    if scope["method"] in _SAFE:
        return
    if in_api:
        check_request_token(scope["headers"], visitor)
    else:
        check_same_origin(scope["headers"])


def _to_login(scope: Scope) -> Response:
    target, query = quote(scope["path"]), scope["query_string"].decode("latin-1")
    asked = f"{target}?{query}" if query else target
    # What changes something is not repeated after the login.
    back = f"?next={quote(asked)}" if scope["method"] in _SAFE else ""
    return RedirectResponse(LOGIN + back, 303)


def _is_browser(scope: Scope) -> bool:
    """Return whether a request is for a page to look at."""
    accepted = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    return scope["method"] in _SAFE and b"text/html" in accepted


def _with_headers(send: Send, root_path: str) -> Send:
    """Return a `send` that adds the headers of pages to every response, as to errors in JSON.

    Redirects name paths of this application, and lead below `root_path`.
    """

    def send_with_headers(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            headers = [
                (name, root_path.encode() + value if name == b"location" else value)
                for name, value in message.get("headers", ())
            ]
            names = {name for name, _ in headers}
            headers += [pair for pair in _HEADERS if pair[0] not in names]
            message = {**message, "headers": headers}
        return send(message)

    return send_with_headers
