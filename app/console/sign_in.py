"""Signs visitors in by any key, and finds the visitor of a request by its cookie."""

import hmac
import time
from collections.abc import Callable, Iterable

from starlette.requests import cookie_parser
from starlette.types import Scope

from app.auth import Authenticator, Principal, Role, id_of, presented_key
from app.console import theme
from app.console.session import LIFETIME_S, Session, request_token
from app.console.visitor import Visitor
from app.database import SharedSecret
from app.errors import InvalidApiKey, PermissionDenied
from app.head_facts import HeadFacts
from app.settings import digest

COOKIE = "gateway_console"
TOKEN_HEADER = b"x-csrf-token"
NO_SESSION = "you are not logged in, or the session has ended: log in again"

RequestHeaders = Iterable[tuple[bytes, bytes]]


class SignIn:
    """Sessions of the console. `now` is the wall clock."""

    def __init__(
        self,
        authenticator: Authenticator,
        secret: SharedSecret,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._authenticator = authenticator
        self._secret = secret
        self._now = now

    async def sign_in(self, key: str) -> tuple[Principal, str]:
        """Return the caller and the cookie of a new session.

        Raises InvalidApiKey and ServiceUnavailable.
        """
        raw = presented_key([(b"x-api-key", key.strip().encode())])
        await self._authenticator.remember_token(raw)
        key_digest, key_id = digest(raw), id_of(raw)
        principal = await self._authenticator.of_any_role(key_id, key_digest)
        expires_at = int(self._now()) + LIFETIME_S
        return principal, Session(key_digest, key_id, expires_at).seal(self._secret.value)

    async def find_visitor(self, headers: RequestHeaders) -> Visitor:
        """Return the visitor of a request.

        Without authentication, a request without a session is the anonymous caller's. Raises
        InvalidApiKey and ServiceUnavailable.
        """
        cookie, chosen = find_cookie(headers, COOKIE), theme_of(headers)
        token = request_token(self._secret.value, cookie)
        session = Session.unseal(self._secret.value, cookie, self._now())
        if session is not None:
            principal = await self._authenticator.of_any_role(session.key_id, session.key_digest)
            return Visitor(principal, token, theme=chosen)
        anonymous = self._authenticator.anonymous
        if anonymous is None:
            raise InvalidApiKey(NO_SESSION)
        return Visitor(anonymous, token, logged_in=False, theme=chosen)

    async def find_again(self, headers: RequestHeaders, visitor: Visitor) -> Visitor:
        """Return the visitor of a request that lasts long, if it is still the same.

        Raises InvalidApiKey once the session has ended, and ServiceUnavailable.
        """
        found = await self.find_visitor(headers)
        before, now = visitor.principal, found.principal
        if now.id != before.id or now.scope != before.scope:
            raise InvalidApiKey(NO_SESSION)
        return found


def theme_of(headers: RequestHeaders) -> theme.Theme:
    """Return the color scheme that a browser asked for."""
    return theme.theme_named(find_cookie(headers, theme.COOKIE))


def find_cookie(headers: RequestHeaders, cookie: str) -> str:
    """Return the value of a cookie; empty if there is none.

    Cookies know no ports: what other programs of the host have set comes too, whatever its form.
    """
    for name, value in headers:
        if name == b"cookie" and (found := cookie_parser(value.decode("latin-1")).get(cookie)):
            return found
    return ""


def check_same_origin(headers: RequestHeaders) -> None:
    """Check that a page of this gateway has sent a request. Raises PermissionDenied.

    Browsers since 2023 send `Sec-Fetch-Site`; others send `Origin` with what changes anything.
    """
    fields = dict(headers)
    site = fields.get(b"sec-fetch-site")
    if site is None:
        origin = fields.get(b"origin", b"").partition(b"://")[2]
        same = origin == fields.get(b"host", b"") and origin != b""
    else:
        same = site == b"same-origin"
    if not same:
        raise PermissionDenied("a page of another site has sent this request")


def is_over_tls(scope: Scope) -> bool:
    """Return whether a form was sent over TLS, which a proxy in front may end.

    Every browser says so; a client that lies hides its session from itself.
    """
    origin: bytes = dict(scope["headers"]).get(b"origin", b"")
    return scope["scheme"] == "https" or origin.startswith(b"https://")


def check_request_token(headers: RequestHeaders, visitor: Visitor) -> None:
    """Check that a request comes from a page that was made for its session.

    Raises PermissionDenied.
    """
    check_same_origin(headers)
    sent = dict(headers).get(TOKEN_HEADER, b"")
    if not hmac.compare_digest(sent, visitor.request_token.encode()):
        raise PermissionDenied("the page is out of date: reload it")


class SessionCallers:
    """Authenticates the requests that the playground sends to models, by session."""

    def __init__(self, sign_in: SignIn) -> None:
        self._sign_in = sign_in

    def recall(self, headers: RequestHeaders, facts: HeadFacts) -> Principal | None:
        """Return None: only `look_up` finds the caller of a session."""
        return None

    async def look_up(self, headers: RequestHeaders) -> Principal:
        """Return the caller. Raises InvalidApiKey, PermissionDenied, ServiceUnavailable."""
        visitor = await self._sign_in.find_visitor(headers)
        check_request_token(headers, visitor)
        if not visitor.may_chat:
            raise PermissionDenied(f"the role {Role(visitor.role)} may not use models")
        return visitor.principal
