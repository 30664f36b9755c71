"""An identity provider: a document of discovery, public keys that rotate, and tokens."""

import asyncio
import json
import ssl
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

AUDIENCE = "vllm-gateway"
_CURVES: dict[str, ec.EllipticCurve] = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1()}


@dataclass(frozen=True)
class SigningKey:
    """A private key, and what the provider publishes of it."""

    kid: str
    algorithm: str
    private: Any

    @classmethod
    def make(cls, algorithm: str = "ES256", bits: int = 2048) -> Self:
        """Make a key; one for RSA takes a tenth of a second."""
        curve = _CURVES.get(algorithm)
        private: Any = (
            rsa.generate_private_key(65537, bits)
            if curve is None
            else ec.generate_private_key(curve)
        )
        return cls(uuid.uuid4().hex, algorithm, private)

    @property
    def jwk(self) -> dict[str, Any]:
        kind = jwt.get_algorithm_by_name(self.algorithm)
        public = json.loads(kind.to_jwk(self.private.public_key()))
        return {**public, "kid": self.kid, "alg": self.algorithm, "use": "sig"}


@dataclass
class IdentityProvider:
    """A provider on the loopback interface."""

    keys: list[SigningKey] = field(default_factory=lambda: [SigningKey.make()])
    # Requests by path.
    seen: list[str] = field(default_factory=list)
    authorization: list[str] = field(default_factory=list)
    # Answers by path, in place of its own: a status and a body, or more bytes without an end.
    answers: dict[str, Callable[[], tuple[str, bytes]]] = field(default_factory=dict)
    port: int = 0
    body: bytes = b""  # of the last request
    tls: ssl.SSLContext | None = None

    @property
    def issuer(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Be down."""
        self._server.close()
        await asyncio.sleep(0)

    def rotate(self, algorithm: str = "ES256", *, withdraw: bool = False) -> SigningKey:
        """Sign with a new key from now on; the old one stays published unless withdrawn."""
        key = SigningKey.make(algorithm)
        self.keys = [key, *([] if withdraw else self.keys)]
        return key

    def token(self, subject: str = "alice", *, key: SigningKey | None = None, **claims: Any) -> str:
        """Return a token as the provider makes it; a claim that is None is left out."""
        key = key or self.keys[0]
        now = int(time.time())
        usual = {
            "iss": self.issuer,
            "aud": AUDIENCE,
            "sub": subject,
            "iat": now,
            "exp": now + 600,
            "jti": uuid.uuid4().hex,
        }
        found = {name: value for name, value in {**usual, **claims}.items() if value is not None}
        return jwt.encode(found, key.private, key.algorithm, headers={"kid": key.kid})

    def jwks(self) -> bytes:
        """Return the public keys."""
        return json.dumps({"keys": [key.jwk for key in self.keys]}).encode()

    def _answer(self, path: str) -> tuple[str, bytes]:
        if path in self.answers:
            return self.answers[path]()
        if path == "/.well-known/openid-configuration":
            document = {"issuer": self.issuer, "jwks_uri": f"{self.issuer}/jwks"}
            return "200 OK", json.dumps(document).encode()
        return ("200 OK", self.jwks()) if path == "/jwks" else ("404 Not Found", b"{}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ", 2)[1]
            self.seen.append(path)
            lines = [line for line in head.split("\r\n") if line.startswith("authorization: ")]
            self.authorization += [line.partition(": ")[2] for line in lines]
            sizes = [line.partition(": ")[2] for line in head.lower().split("\r\n")
                     if line.startswith("content-length: ")]  # fmt: skip
            self.body = await reader.readexactly(int(sizes[0]) if sizes else 0)
            status, body = self._answer(path)
            writer.write(
                f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
                .encode()
            )  # fmt: skip
            writer.write(body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
