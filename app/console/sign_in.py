"""Begins and ends sessions, and finds the visitor of a request by its cookie."""

import hmac
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import Scope

from app.auth import Authenticator, Principal, Role, id_of, presented_key
from app.console import language, theme
from app.console.session import LIFETIME_S, PERSON, Session, request_token
from app.console.visitor import CONSOLE, Visitor
from app.database import SharedSecret
from app.errors import InvalidApiKey, PermissionDenied
from app.head_facts import HeadFacts
from app.settings import digest

if TYPE_CHECKING:  # imported only where people sign in by an identity provider
    from app.auth.oidc import PersonSessions, SignedIn

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
        *,
        with_keys: bool = True,
        people: "PersonSessions | None" = None,
    ) -> None:
        """`with_keys`: keys may begin sessions; `people` has those of an identity provider."""
        self._authenticator = authenticator
        self._secret = secret
        self._now = now
        self.with_keys = with_keys
        self._people = people

    async def sign_in(self, key: str) -> tuple[Principal, str]:
        """Return the caller and the cookie of a new session.

        Raises InvalidApiKey, PermissionDenied and ServiceUnavailable.
        """
        if not self.with_keys:
            raise PermissionDenied(language.noop("Keys are not accepted here."))
        raw = presented_key([(b"x-api-key", key.strip().encode())])
        await self._authenticator.remember_token(raw)
        key_digest, key_id = digest(raw), id_of(raw)
        principal = await self._authenticator.of_any_role(key_id, key_digest)
        expires_at = int(self._now()) + LIFETIME_S
        return principal, Session(key_digest, key_id, expires_at).seal(self._secret.value)

    async def begin_of_person(self, signed_in: "SignedIn") -> tuple[str, int]:
        """Return the cookie of a new session, and how long it lasts, in seconds.

        Raises ServiceUnavailable.
        """
        assert self._people is not None
        token, until = await self._people.begin(signed_in)
        cookie = Session(token, PERSON, until).seal(self._secret.value)
        return cookie, max(until - int(self._now()), 0)

    async def end_of_person(self, headers: RequestHeaders) -> str | None:
        """End the session of a person; return its ID token, if there is one.

        Raises ServiceUnavailable.
        """
        session = self._session(find_cookie(headers, COOKIE))
        if session is None or session.key_id != PERSON or self._people is None:
            return None
        return await self._people.end(session.key_digest)

    def _session(self, cookie: str) -> Session | None:
        return Session.unseal(self._secret.value, cookie, self._now())

    async def find_visitor(self, headers: RequestHeaders) -> Visitor:
        """Return the visitor of a request.

        Without authentication, a request without a session is the anonymous caller's. Raises
        InvalidApiKey and ServiceUnavailable.
        """
        cookie, chosen = find_cookie(headers, COOKIE), theme_of(headers)
        token = request_token(self._secret.value, cookie)
        session = self._session(cookie)
        if session is not None and session.key_id == PERSON:
            if self._people is None:
                raise InvalidApiKey(NO_SESSION)
            found = await self._people.find(session.key_digest)
            return Visitor(
                found.principal,
                token,
                theme=chosen,
                name=found.name,
                is_person=True,
                makes_own_keys=self._people.settings.own_keys is not None,
            )
        if session is not None and self.with_keys:
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


def language_of(headers: RequestHeaders) -> language.Language:
    """Return the language of a browser: the chosen one, or one that it accepts."""
    accepted = next((value for name, value in headers if name == b"accept-language"), b"")
    return language.chosen_language(
        find_cookie(headers, language.COOKIE), accepted.decode("latin-1")
    )


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
        raise PermissionDenied(language.noop("a page of another site has sent this request"))


def is_over_tls(scope: Scope) -> bool:
    """Return whether a form was sent over TLS, which a proxy in front may end.

    Every browser says so; a client that lies hides its session from itself.
    """
    origin: bytes = dict(scope["headers"]).get(b"origin", b"")
    return scope["scheme"] == "https" or origin.startswith(b"https://")


def set_console_cookie(
    response: Response, name: str, value: str, lifetime_s: int, *, root_path: str, secure: bool
) -> None:
    """Set a cookie that only pages of the console send, and no script reads."""
    response.set_cookie(
        name,
        value,
        max_age=lifetime_s,
        path=root_path + CONSOLE,
        secure=secure,
        httponly=True,
        samesite="strict",
    )


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
