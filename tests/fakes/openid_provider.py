"""An identity provider that people sign in at: codes for ID tokens, with PKCE as providers do it.

The test is the browser and the person: `grant` returns what the provider would send back.
"""

import base64
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from app.auth.oidc.id_token import LOGOUT_EVENT
from tests.fakes.identity_provider import IdentityProvider, SigningKey

CLIENT_ID = "console"
SECRET = "the-secret:of/the+console%"


@dataclass
class Grant:
    """A code, and what it was made for."""

    request: dict[str, str]
    id_token: str | None
    userinfo: dict[str, Any]


@dataclass
class OpenIdProvider(IdentityProvider):
    """A provider with an endpoint for each step of a sign-in."""

    grants: dict[str, Grant] = field(default_factory=dict)
    # Added to the document of discovery; None takes a member out.
    discovery: dict[str, Any] = field(default_factory=dict)

    def grant(
        self, url: str, subject: str = "alice", *, key: SigningKey | None = None, **claims: Any
    ) -> dict[str, str]:
        """Return the query of the address to which the browser is sent back.

        `claims` are those of the ID token; `id_token` is one in its place, and `userinfo` has what
        is said only at that endpoint.
        """
        request = dict(parse_qsl(urlsplit(url).query))
        userinfo = {"sub": subject, **claims.pop("userinfo", {})}
        token = claims.pop("id_token", None)
        if token is None:
            usual = {"aud": request["client_id"], "nonce": request["nonce"], "sid": "session"}
            token = self.token(subject, key=key, **{**usual, **claims})
        code = f"code-{len(self.grants)}"
        self.grants[code] = Grant(request, token, userinfo)
        return {"code": code, "state": request["state"], "iss": self.issuer}

    def logout_token(self, **claims: Any) -> str:
        """Return a token that ends a session; a claim that is None is left out."""
        usual = {"aud": CLIENT_ID, "events": {LOGOUT_EVENT: {}}, "sid": "session"}
        return self.token(**{"subject": "alice", **usual, **claims})

    def _answer(self, path: str) -> tuple[str, bytes]:
        if path in self.answers:
            return self.answers[path]()
        if path == "/.well-known/openid-configuration":
            names = ("authorization", "token", "userinfo", "end_session")
            document = {
                "issuer": self.issuer,
                "jwks_uri": f"{self.issuer}/jwks",
                **{f"{name}_endpoint": f"{self.issuer}/{name}" for name in names},
                **self.discovery,
            }
            return "200 OK", json.dumps(document).encode()
        if path == "/token":
            return self._exchange({k: v[0] for k, v in parse_qs(self.body.decode()).items()})
        if path == "/userinfo":
            code = self.authorization[-1].removeprefix("Bearer ")
            return "200 OK", json.dumps(self.grants[code].userinfo).encode()
        return super()._answer(path)

    def _exchange(self, form: dict[str, str]) -> tuple[str, bytes]:
        grant = self.grants.get(form["code"])
        refused = "400 Bad Request", b'{"error": "invalid_grant"}'
        if grant is None or grant.id_token is None:
            return refused
        hashed = hashlib.sha256(form["code_verifier"].encode()).digest()
        challenge = base64.urlsafe_b64encode(hashed).rstrip(b"=").decode()
        scheme, _, credentials = self.authorization[-1].partition(" ")
        client = base64.b64decode(credentials).decode().split(":")
        if scheme != "Basic" or [unquote(part) for part in client] != [CLIENT_ID, SECRET]:
            return "401 Unauthorized", b'{"error": "invalid_client"}'
        same = form["redirect_uri"] == grant.request["redirect_uri"]
        if grant.request["code_challenge"] != challenge or not same:
            return refused
        token, grant.id_token = grant.id_token, None  # a code is used once
        answer = {"access_token": form["code"], "token_type": "Bearer", "id_token": token}
        return "200 OK", json.dumps(answer).encode()
