"""The certificate of `server.tls`: loaded, watched for changes, and how long it holds.

ACME clients and cert-manager replace the files while the gateway runs. New connections get the new
certificate, open ones keep theirs.
"""

import asyncio
import logging
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from app.settings import ConfigError, TlsSettings

log = logging.getLogger(__name__)

# Seconds between two looks at the files.
POLL_S = 10.0
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}

# With forward secrecy and authenticated encryption only, as Mozilla's "intermediate" configuration;
# OpenSSL's own choice has CBC. Those of TLS 1.3 are all of that kind.
_TLS_1_2_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"

# Changes with the content of a file, also where a link is set to another one.
_Stamp = tuple[int, int, int]


class Certificate:
    """What the gateway presents to clients; `context` is that of the next connection."""

    def __init__(self, settings: TlsSettings) -> None:
        """Load the files. Raises ConfigError."""
        self._settings = settings
        self._stamp = self._look()
        self.context, self.expires = _load(settings)

    async def watch(self) -> NoReturn:
        """Load the files again whenever they change; faulty ones leave what is in use."""
        while True:
            await asyncio.sleep(POLL_S)
            self.refresh()

    def refresh(self) -> None:
        """Load the files again if they have changed."""
        stamp = self._look()
        if stamp == self._stamp:
            return
        # Also after a fault: it is logged once, and key and certificate change one by one.
        self._stamp = stamp
        try:
            self.context, self.expires = _load(self._settings)
        except ConfigError as error:
            for fault in error.faults:
                log.warning("%s; the certificate until %s stays in use", fault, self.expires)
        else:
            log.info("certificate loaded again: it is %s", self.describe())

    def describe(self, now: datetime | None = None) -> str:
        """Return until when the certificate is valid, or since when it is not."""
        expired = self.expires <= (now or datetime.now(UTC))
        return f"{'EXPIRED since' if expired else 'valid until'} {self.expires:%Y-%m-%d %H:%M} UTC"

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(file) for file in self._settings.files().values())


def _stamp(file: Path) -> _Stamp:
    try:
        found = file.stat()
    except OSError:
        return 0, 0, 0  # loading says why
    return found.st_mtime_ns, found.st_size, found.st_ino


def _load(settings: TlsSettings) -> tuple[ssl.SSLContext, datetime]:
    """Return the context of connections, and when its certificate expires. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[settings.min_version]
    context.set_ciphers(_TLS_1_2_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    context.num_tickets = 1  # OpenSSL sends two; each resumption brings the next
    expires = _read_expiry(settings.cert_file)
    _check_readable("key_file", settings.key_file)
    try:
        # The password is asked for only where there is one; OpenSSL would ask the terminal.
        context.load_cert_chain(settings.cert_file, settings.key_file, password="")
    except ssl.SSLError as error:
        raise ConfigError([_chain_fault(settings, error)]) from None
    if (file := settings.client_ca_file) is not None:
        _check_readable("client_ca_file", file)
        try:
            context.load_verify_locations(file)
        except ssl.SSLError:
            raise ConfigError([f"server.tls.client_ca_file {file} has no certificate"]) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context, expires


def _read_expiry(file: Path) -> datetime:
    from cryptography import x509  # 8 MiB, for those who use it

    try:
        leaf = x509.load_pem_x509_certificate(file.read_bytes())
    except OSError as error:
        raise _unreadable("cert_file", file, error) from None
    except ValueError:
        raise ConfigError([f"server.tls.cert_file {file} has no PEM certificate"]) from None
    return leaf.not_valid_after_utc


def _check_readable(name: str, file: Path) -> None:
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise _unreadable(name, file, error) from None


def _unreadable(name: str, file: Path, error: OSError) -> ConfigError:
    return ConfigError([f"server.tls.{name} {file} cannot be read: {error.strerror}"])


def _chain_fault(settings: TlsSettings, error: ssl.SSLError) -> str:
    key = f"server.tls.key_file {settings.key_file}"
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"{key} is not the key of the certificate in {settings.cert_file}"
    return f"{key} has no PEM private key without a password"
