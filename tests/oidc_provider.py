"""The certified `oidc-provider` of the npm registry, as a process on the loopback interface."""

import json
import os
import shutil
import socket
from pathlib import Path

import httpx
import jwt

from tests.clients.environments import programs
from tests.fakes.identity_provider import SigningKey
from tests.services import Server

SERVER = Path(__file__).with_suffix(".mjs")
CLIENT = ("agent", "the-secret-of-agent")


class OidcProvider(Server):
    """Makes access tokens for a client with a secret, signed with the first of its keys."""

    def __init__(self, *keys: SigningKey) -> None:
        """Raises Unavailable without npm or its registry."""
        super().__init__("oidc")
        self.issuer = f"http://127.0.0.1:{self.port}"
        self.keys = list(keys)
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
        return ["env", f"KEYS={keys}", f"PATH={os.environ['PATH']}", "node", str(self._program),
                str(self.port)]  # fmt: skip

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def _private_jwk(key: SigningKey) -> dict[str, str]:
    private: dict[str, str] = json.loads(
        jwt.get_algorithm_by_name(key.algorithm).to_jwk(key.private)
    )
    return {**private, "kid": key.kid, "alg": key.algorithm, "use": "sig"}
