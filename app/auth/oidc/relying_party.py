"""Signs people in by the authorization code flow with PKCE (OpenID Connect Core, RFC 7636, 9700).

`begin` makes what the browser takes to the provider, `finish` checks what it brings back. Nothing
is kept here in between: an `Attempt` travels in a sealed cookie, so that any gateway of a database
can finish what another one has begun.
"""

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from app.auth.oidc.discovery import DiscoveryFetch, Endpoints
from app.auth.oidc.id_token import (
    LogoutNotice,
    SignedIn,
    check_id_token,
    logout_notice,
    missing_claims,
    optional_text,
    person_of,
)
from app.auth.presented_key import invalid_key
from app.auth.tokens import (
    FetchError,
    IdentityProvider,
    UnusableClaim,
    caller_id,
    connected,
    read_claims,
    read_head,
    read_object,
    send,
    text_claim,
)
from app.errors import InvalidApiKey, ServiceUnavailable
from app.settings import OidcSettings
from engines.secret_variables import secret_value

MAX_ID_TOKEN = 65_536
# Longest ID token that is kept for the sign-out: it becomes a part of an address.
MAX_HINT = 4096
# Codes that are exchanged at once. Whoever begins a sign-in can bring any code back, without an
# account, and each is a connection to the provider.
MAX_EXCHANGES = 16
_CODE = re.compile(r"[a-z_]{1,40}")


class SignInFailed(Exception):
    """A sign-in was not completed; the message is for the person.

    It is `template` with `values` in it, by which it can be translated.
    """

    def __init__(self, template: str, /, **values: object) -> None:
        super().__init__(template % values)
        self.template = template
        self.values = values


class SignInRefused(SignInFailed):
    """The provider vouches for a person, whose claims give no access; `claim` is the reason."""

    def __init__(self, person_id: str, claim: str, template: str) -> None:
        super().__init__(template, claim=claim)
        self.person_id = person_id
        self.claim = claim


class Attempt(msgspec.Struct, frozen=True):
    """A sign-in that has begun. The browser that holds it must bring back the answer."""

    state: str
    nonce: str
    verifier: str  # of PKCE
    redirect_uri: str

    @classmethod
    def new(cls, redirect_uri: str) -> "Attempt":
        """Return an attempt with random values."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        return cls(state, nonce, verifier, redirect_uri)

    @property
    def challenge(self) -> str:
        """The verifier's SHA-256 (S256)."""
        found = hashlib.sha256(self.verifier.encode()).digest()
        return base64.urlsafe_b64encode(found).rstrip(b"=").decode()


class RelyingParty:
    """The console as a client of an identity provider. `now` is the wall clock."""

    def __init__(self, settings: OidcSettings, now: Callable[[], float] = time.time) -> None:
        self.settings = settings
        self._now = now
        self._discovery = DiscoveryFetch(settings)
        self._provider = IdentityProvider(settings, self._discovery, on_keys=_ignore)
        self._exchanges = asyncio.Semaphore(MAX_EXCHANGES)

    async def begin(self, redirect_uri: str) -> tuple[str, Attempt]:
        """Return the provider's address for a sign-in. Raises SignInFailed if it is down."""
        endpoints = await self._endpoints()
        attempt = Attempt.new(redirect_uri)
        query = {
            "response_type": "code",
            "client_id": self.settings.client_id,
            "redirect_uri": redirect_uri,
            "scope": " ".join(self.settings.scopes),
            "state": attempt.state,
            "nonce": attempt.nonce,
            "code_challenge": attempt.challenge,
            "code_challenge_method": "S256",
        }
        return _with_query(endpoints.authorization, query), attempt

    async def finish(self, attempt: Attempt, answer: Sequence[tuple[str, str]]) -> SignedIn:
        """Return who has signed in, by the parameters that the browser has brought.

        Raises SignInFailed, and SignInRefused.
        """
        values = dict(answer)
        if len(values) < len(answer):
            raise SignInFailed("The answer of the identity provider is not valid. Start again.")
        if not hmac.compare_digest(values.get("state", "").encode(), attempt.state.encode()):
            raise SignInFailed("This sign-in has begun in another window or browser. Start again.")
        endpoints = await self._endpoints()
        issuer = values.get("iss")
        if issuer != self.settings.issuer and (issuer is not None or endpoints.names_issuer):
            raise SignInFailed("The answer is of another identity provider. Start again.")
        if "error" in values or not values.get("code"):
            raise SignInFailed("The identity provider refused%(code)s.", code=_reason(values))
        if self._exchanges.locked():
            raise SignInFailed("Too many people sign in now. Try again in a moment.")
        async with self._exchanges:
            tokens = await self._exchange(endpoints, attempt, values["code"])
            return await self._signed_in(endpoints, attempt, tokens)

    def sign_out_url(self, hint: str | None, return_to: str) -> str | None:
        """Return the address that ends the session at the provider; None: it has none.

        `hint` is the ID token of the session.
        """
        endpoints = self._discovery.endpoints
        if endpoints is None or endpoints.end_session is None:
            return None
        query = {"client_id": self.settings.client_id, "post_logout_redirect_uri": return_to}
        if hint is not None:
            query["id_token_hint"] = hint
        return _with_query(endpoints.end_session, query)

    async def read_logout(self, token: str) -> LogoutNotice:
        """Return the sessions that a logout token ends.

        Raises InvalidApiKey, and ServiceUnavailable without the provider's keys.
        """
        return logout_notice(await self._verify(token, ("iat", "jti")), self._now())

    async def run(self) -> None:
        """Fetch the provider's addresses and keys again and again, until canceled."""
        await self._provider.run()

    async def close(self) -> None:
        """Cancel a fetch that is under way; call it after `run` has ended."""
        await self._provider.close()

    async def _endpoints(self) -> Endpoints:
        """Return the provider's addresses. Raises SignInFailed while it does not answer."""
        await self._provider.refresh_if_old()
        endpoints = self._discovery.endpoints
        if endpoints is None or self._provider.failed:
            raise SignInFailed("The identity provider does not answer now. Try again later.")
        return endpoints

    async def _exchange(
        self, endpoints: Endpoints, attempt: Attempt, code: str
    ) -> Mapping[str, Any]:
        """Return the provider's tokens for a code. Raises SignInFailed."""
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": attempt.redirect_uri,
            "code_verifier": attempt.verifier,
        }
        headers = {}
        variable = self.settings.client_secret_env
        secret = "" if variable is None else secret_value(variable) or ""
        if variable is None:
            form["client_id"] = self.settings.client_id
        elif endpoints.secret_in_form:
            form |= {"client_id": self.settings.client_id, "client_secret": secret}
        else:
            headers["authorization"] = _basic(self.settings.client_id, secret)
        status, found = await self._ask("POST", endpoints.token, headers, form)
        if status != 200:
            raise SignInFailed(
                "The identity provider refused%(code)s. Start again.", code=_reason(found)
            )
        return found

    async def _ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        form: Mapping[str, str] | None = None,
    ) -> tuple[int, Mapping[str, Any]]:
        """Return the status and the object of an answer. Raises SignInFailed."""
        try:
            async with connected(self.settings.ca_file) as client:
                status, body = await send(client, method, url, headers=headers, form=form)
            return status, read_object(url, body)
        except FetchError as error:
            raise SignInFailed(
                "The identity provider does not answer: %(reason)s.", reason=error
            ) from None

    async def _signed_in(
        self, endpoints: Endpoints, attempt: Attempt, tokens: Mapping[str, Any]
    ) -> SignedIn:
        token = tokens.get("id_token")
        if not isinstance(token, str):
            raise SignInFailed("The identity provider sent no ID token.")
        try:
            claims = await self._verify(token, ("iat", "sub"))
            check_id_token(claims, self.settings, attempt.nonce)
            subject, session = text_claim(claims, "sub"), optional_text(claims, "sid")
        except UnusableClaim as error:
            raise SignInFailed(
                "The provider's ID token has no usable %(claim)s.", claim=error.claim
            ) from None
        except InvalidApiKey as error:
            raise SignInFailed(
                "The provider's ID token is not valid: %(reason)s.", reason=error.message
            ) from None
        except ServiceUnavailable:
            raise SignInFailed("The keys of the identity provider are not there yet.") from None
        if missing_claims(claims, self.settings):
            claims = await self._with_userinfo(endpoints, claims, tokens)
        settings, role = self.settings, self.settings.role_claim
        person_id = caller_id(settings.name, subject)
        try:
            person = person_of(claims, settings)
        except UnusableClaim as error:
            raise SignInRefused(
                person_id, error.claim, "No access: your account has no usable %(claim)s."
            ) from None
        if person is None:
            raise SignInRefused(
                person_id, role, "No access: %(claim)s of your account has no role."
            )
        return SignedIn(
            person=person,
            subject=subject,
            provider_session=session,
            issued_at=int(claims["iat"]),
            id_token=token,
        )

    async def _with_userinfo(
        self, endpoints: Endpoints, claims: Mapping[str, Any], tokens: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the claims with those that the provider gives only on request.

        Raises SignInFailed.
        """
        access_token = tokens.get("access_token")
        if endpoints.userinfo is None or not isinstance(access_token, str):
            return claims
        headers = {"authorization": f"Bearer {access_token}"}
        status, found = await self._ask("GET", endpoints.userinfo, headers)
        if status != 200 or found.get("sub") != claims["sub"]:
            raise SignInFailed("The identity provider gave no claims of your account.")
        return {**found, **claims}

    async def _verify(self, token: str, required: Sequence[str]) -> Mapping[str, Any]:
        """Return the claims of a token of the provider for this client.

        Raises InvalidApiKey and ServiceUnavailable.
        """
        if len(token) > MAX_ID_TOKEN:
            raise InvalidApiKey(f"it is over {MAX_ID_TOKEN:,} characters")
        raw, client_id = token.encode(errors="replace"), self.settings.client_id
        try:
            head = read_head(raw)
            key = await self._provider.find_key(head.kid, head.algorithm)
            return read_claims(raw, key, self.settings, client_id, required, noun="it")
        except InvalidApiKey as error:
            if error.message == invalid_key().message:
                raise InvalidApiKey("its form, its key or its signature does not fit") from None
            raise


def _ignore() -> None:
    """Do nothing: sessions do not end with a key of the provider."""


def _basic(client_id: str, secret: str) -> str:
    """Return a client's credentials for a header (RFC 6749, section 2.3.1)."""
    pair = f"{quote(client_id, safe='')}:{quote(secret, safe='')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _reason(values: Mapping[str, Any]) -> str:
    """Return the code of an error; nothing else of it: anyone can put words into an address."""
    code = values.get("error")
    return f" ({code})" if isinstance(code, str) and _CODE.fullmatch(code) else ""


def _with_query(url: str, query: Mapping[str, str]) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}"
