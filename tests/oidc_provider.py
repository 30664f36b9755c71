"""The certified `oidc-provider` of the npm registry, as a process on the loopback interface."""

import json
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import jwt

from tests.clients.environments import programs
from tests.fakes.identity_provider import SigningKey
from tests.services import Server

SERVER = Path(__file__).with_suffix(".mjs")
CLIENT = ("agent", "the-secret-of-agent")
CONSOLE_SECRET = "the-secret-of-console"


class OidcProvider(Server):
    """Makes tokens for clients with a secret, signed with the first of its keys.

    People sign in with any password to `consoles`, addresses by client ID, that were there when it
    started. To browsers its host is another site than that of gateways.
    """

    def __init__(self, *keys: SigningKey, people: Mapping[str, Any] | None = None) -> None:
        """`people` are claims by subject. Raises Unavailable without npm or its registry."""
        super().__init__("oidc")
        host = "127.0.0.1" if people is None else "localhost"
        self.issuer = f"http://{host}:{self.port}"
        self.keys = list(keys)
        self.people = people or {}
        self.consoles: dict[str, str] = {}
        self.console_certificate: Path | None = None  # of an authority of its own
        self._program = programs("oidc-provider") / SERVER.name
        shutil.copy(SERVER, self._program)  # Node looks for packages beside it

    def restart(self, *keys: SigningKey) -> None:
        """Start again with other keys."""
        self.stop()
        self.keys = list(keys)
        self.start()

    def token(self) -> str:
        """Return a new access token."""
        form = {"grant_type": "client_credentials"}
        answer = httpx.post(f"{self.issuer}/token", data=form, auth=CLIENT)
        token: str = answer.raise_for_status().json()["access_token"]
        return token

    def _command(self) -> list[str]:
        keys = json.dumps([_private_jwk(key) for key in self.keys])
        people, consoles = json.dumps(self.people), json.dumps(self.consoles)
        return ["env", f"KEYS={keys}", f"PEOPLE={people}", f"ISSUER={self.issuer}",
                f"CONSOLES={consoles}",
                f"NODE_EXTRA_CA_CERTS={self.console_certificate or ''}",
                f"PATH={os.environ['PATH']}", "node", str(self._program),
                str(self.port)]  # fmt: skip

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def _private_jwk(key: SigningKey) -> dict[str, str]:
    private: dict[str, str] = json.loads(
        jwt.get_algorithm_by_name(key.algorithm).to_jwk(key.private)
    )
    private.pop("key_ops", None)  # of RSA, for signatures only: the provider verifies, too
    return {**private, "kid": key.kid, "alg": key.algorithm, "use": "sig"}
