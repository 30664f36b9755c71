"""Routes of the sign-in by an identity provider: to the provider, back from it, and its sign-outs.

The browser that begins a sign-in gets the attempt in a sealed cookie, and only it can finish it:
nobody can have another's browser finish theirs. That cookie is `SameSite=Lax`, since the provider
leads the browser back; the session's is `Strict`. So the browser is led on by pages, not by
redirects: with these it would take the next request for the provider's, and send no session.
"""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from fastapi import APIRouter, Form, Request, Response

from app.api import ActLimiter, client_address, error_response
from app.audit import Action, Actor, AuditRecord, AuditTrail
from app.auth import Role
from app.auth.oidc import (
    Attempt,
    PersonSessions,
    RelyingParty,
    SignedIn,
    SignInFailed,
    SignInRefused,
)
from app.console.language import Message, noop
from app.console.next_path import next_path
from app.console.rendering import HEADERS, Renderer
from app.console.session import seal, unseal
from app.console.sign_in import (
    COOKIE,
    SignIn,
    check_same_origin,
    find_cookie,
    is_over_tls,
    set_console_cookie,
    theme_of,
)
from app.console.visitor import CONSOLE
from app.database import SharedSecret
from app.errors import BadRequest, GatewayError, InvalidApiKey
from app.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

BEGIN = f"{CONSOLE}/login/oidc"
CALLBACK = f"{BEGIN}/callback"
# Called by the provider itself, not by a browser.
PROVIDER_SIGN_OUT = f"{CONSOLE}/logout/oidc"
ATTEMPT_COOKIE = "gateway_console_attempt"
# Time to enter a password and a second factor at the provider.
ATTEMPT_S = 600
_PURPOSE = b"console attempt\0"
_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")


class _Sealed(msgspec.Struct, frozen=True):
    """An attempt in a browser, where it leads to, and until when it can be finished."""

    attempt: Attempt
    next_path: str
    until: int


@dataclass(frozen=True, slots=True)
class OidcSignIn:
    """What sign-in by an identity provider is made of."""

    party: RelyingParty
    people: PersonSessions
    sign_in: SignIn
    renderer: Renderer
    secret: SharedSecret
    audit: AuditTrail
    metrics: Metrics
    acts: ActLimiter
    # Stands before the paths that a browser knows.
    root_path: str
    now: Callable[[], float] = time.time

    async def begin(self, request: Request, next: Annotated[str, Form()] = "") -> Response:
        """Lead the browser to the provider."""
        target = next_path(next, self.root_path)
        try:
            check_same_origin(request.scope["headers"])
            url, attempt = await self.party.begin(self._address(request) + CALLBACK)
        except SignInFailed as error:
            return self._fault(request, _message(error), 503, target)
        except GatewayError as error:
            return self._fault(request, error.message, error.status, target)
        sealed = msgspec.json.encode(_Sealed(attempt, target, int(self.now()) + ATTEMPT_S))
        response = self.renderer.lead_to(theme_of(request.scope["headers"]), url)
        response.set_cookie(
            ATTEMPT_COOKIE,
            seal(self.secret.value, _PURPOSE, sealed),
            max_age=ATTEMPT_S,
            path=self.root_path + BEGIN,
            secure=is_over_tls(request.scope),
            httponly=True,
            samesite="lax",
        )
        return response

    async def finish(self, request: Request) -> Response:
        """Begin the session of the person whom the provider has sent back."""
        headers = request.scope["headers"]
        sealed = self._attempt(find_cookie(headers, ATTEMPT_COOKIE))
        if sealed is None:
            message = noop(
                "This sign-in was not begun in this browser, or too long ago. Start again."
            )
            return self._fault(request, message, 400)
        try:
            signed_in = await self._person(request, sealed.attempt)
            cookie, lifetime_s = await self.sign_in.begin_of_person(signed_in)
        except SignInRefused as error:
            return self._fault(request, _message(error), 403, sealed.next_path)
        except SignInFailed as error:
            return self._fault(request, _message(error), 401, sealed.next_path)
        except GatewayError as error:
            return self._fault(request, error.message, error.status, sealed.next_path)
        person = signed_in.person
        await self._record(request, person.id, person.role, Action.SESSION_SIGN_IN)
        target = self.root_path + sealed.next_path
        response = self.renderer.lead_to(theme_of(headers), target)
        # The callback has no `Origin`; the page that began had.
        secure = sealed.attempt.redirect_uri.startswith("https://")
        set_console_cookie(
            response, COOKIE, cookie, lifetime_s, root_path=self.root_path, secure=secure
        )
        self._forget_attempt(response)
        return response

    async def _person(self, request: Request, attempt: Attempt) -> SignedIn:
        """Return who has signed in; one who is refused is a record of the audit.

        Raises SignInFailed, SignInRefused and RateLimited.
        """
        try:
            signed_in = await self.party.finish(attempt, request.query_params.multi_items())
        except SignInRefused as error:
            self.acts.check_id(error.person_id)
            await self._record(
                request, error.person_id, None, Action.SESSION_REFUSE, claim=error.claim
            )
            raise
        if signed_in.person.role is not Role.ADMIN:
            self.acts.check_id(signed_in.person.id)
        return signed_in

    async def sign_out_page(self, request: Request) -> Response | None:
        """End the session of a person; return what leads to the provider to end its session, too.

        None: it is no session of a person, or the provider ends none. Raises ServiceUnavailable.
        """
        hint = await self.sign_in.end_of_person(request.scope["headers"])
        url = self.party.sign_out_url(hint, f"{self._address(request)}{CONSOLE}/login")
        if hint is None or url is None:
            return None
        return self.renderer.lead_to(theme_of(request.scope["headers"]), url)

    async def provider_sign_out(
        self, request: Request, logout_token: Annotated[str, Form()] = ""
    ) -> Response:
        """End the sessions that a logout token names (OpenID Connect Back-Channel Logout)."""
        try:
            notice = await self.party.read_logout(logout_token)
            people = await self.people.end_all(notice)
        except InvalidApiKey as error:
            log.info("sign-out of the identity provider refused: %s", error.message)
            refusal = BadRequest(f"the logout token is not valid: {error.message}")
            return error_response(refusal, request.scope)
        except GatewayError as error:
            return error_response(error, request.scope)
        for person in people:
            await self._record(request, person, None, Action.SESSION_SIGN_OUT)
        return Response(headers=HEADERS)

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(include_in_schema=False)
        router.post(BEGIN)(self.begin)
        router.get(CALLBACK)(self.finish)
        router.post(PROVIDER_SIGN_OUT)(self.provider_sign_out)
        return router

    def _address(self, request: Request) -> str:
        """Return the gateway's address as the browser knows it. Raises BadRequest."""
        host = request.headers.get("host", "")
        if not _HOST.fullmatch(host):
            raise BadRequest(noop("the request has no usable Host header"))
        scheme = "https" if is_over_tls(request.scope) else "http"
        return f"{scheme}://{host}{self.root_path}"

    def _attempt(self, cookie: str) -> _Sealed | None:
        content = unseal(self.secret.value, _PURPOSE, cookie)
        if content is None:
            return None
        sealed = msgspec.json.decode(content, type=_Sealed)
        return sealed if self.now() < sealed.until else None

    def _fault(self, request: Request, fault: str, status: int, target: str = CONSOLE) -> Response:
        """Return the login page with a fault; an attempt in the browser is over."""
        self.metrics.auth_failures.add(("invalid",))
        log.info("sign-in by the identity provider failed: %s", fault)
        theme = theme_of(request.scope["headers"])
        response = self.renderer.login(theme, next_path=target, fault=fault, status=status)
        self._forget_attempt(response)
        return response

    def _forget_attempt(self, response: Response) -> None:
        response.delete_cookie(
            ATTEMPT_COOKIE, path=self.root_path + BEGIN, httponly=True, samesite="lax"
        )

    async def _record(
        self, request: Request, person_id: str, role: str | None, action: Action, **facts: str
    ) -> None:
        actor = Actor(person_id, role, client_address(request.scope))
        await self.audit.record(
            AuditRecord(actor=actor, action=action, target="console", after=facts or None)
        )


def _message(error: SignInFailed) -> Message:
    return Message(error.template, **error.values)
