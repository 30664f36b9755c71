"""What the gateways with TLS and with access tokens need: a certificate, and an identity provider.

The provider is a directory with one file, its public keys, which the gateway fetches at its start.
"""

import contextlib
import datetime
import json
import sys
import time
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

import httpx
import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from bench.children import child, free_port, wait_until

AUDIENCE = "bench"
# Of the certificate and the token: longer than any run.
VALID = datetime.timedelta(days=2)
START_S = 30.0


def certificate(directory: Path) -> dict[str, str]:
    """Make a certificate for 127.0.0.1 on P-256; return the settings `server.tls` with it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID)
        .not_valid_after(now + VALID)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    files = {"cert_file": directory / "cert.pem", "key_file": directory / "key.pem"}
    files["cert_file"].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files["key_file"].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return {name: str(file) for name, file in files.items()}


@contextlib.contextmanager
def identity_provider(directory: Path) -> Iterator[tuple[dict[str, str], str]]:
    """Run a provider; the values are its settings in `auth.jwt` and an access token."""
    key = ec.generate_private_key(ec.SECP256R1())
    published = {**ECAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "1", "use": "sig"}
    (directory / "keys.json").write_text(json.dumps({"keys": [published]}))
    port = free_port()
    issuer = f"http://127.0.0.1:{port}"
    claims = {"iss": issuer, "aud": AUDIENCE, "sub": "bench", "exp": time.time() + 86_400}
    token = jwt.encode(claims, key, "ES256", {"kid": "1"})
    argv = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    keys = f"{issuer}/keys.json"
    with child("provider", argv, cwd=directory) as running:
        wait_until(lambda: _serves(keys), running, START_S)
        yield {"name": "bench", "issuer": issuer, "audience": AUDIENCE, "jwks_uri": keys}, token


def _serves(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.TransportError:
        return False
