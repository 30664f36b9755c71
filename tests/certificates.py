"""Certificates for tests, made in a millisecond."""

import datetime
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Identity:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(PEM)

    @property
    def key_pem(self) -> bytes:
        return self.encrypted_key_pem(None)

    def encrypted_key_pem(self, password: bytes | None) -> bytes:
        """Return the key; None: without a password."""
        how: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            how = serialization.BestAvailableEncryption(password)
        return self.key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, how)

    def write(self, file: Path) -> Path:
        """Write the certificate and its key into a file; return it."""
        file.write_bytes(self.certificate_pem + self.key_pem)
        return file


def make_identity(
    name: str = "localhost",
    *,
    address: str = "127.0.0.1",
    issuer: Identity | None = None,
    days_left: float = 1,
) -> Identity:
    """Make a certificate for an address, signed by an authority or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer is not None else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=30))
        .not_valid_after(now + datetime.timedelta(days=days_left))
        .add_extension(x509.BasicConstraints(issuer is None, None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address(address))]), False)
        .sign(issuer.key if issuer is not None else key, hashes.SHA256())
    )
    return Identity(made, key)
