"""Sessions of the console: who has logged in, sealed into a cookie.

A session names a key by its digest and ends with it: each request looks the key up again. Nothing
is kept in memory, so that sessions outlive a restart of the gateway, and several gateways with one
database share them. The seal is HMAC-SHA256 with a secret of the database.
"""

import base64
import binascii
import hmac
import struct
from dataclasses import dataclass
from typing import Self

LIFETIME_S = 12 * 3600
_DIGEST_BYTES = 32
# Expiry in seconds since 1970, and the digest of the key; the key's ID follows.
_FIXED = struct.Struct(f">Q{_DIGEST_BYTES}s")
_SEAL_BYTES = 32
# What a secret is used for is part of each message: a token is never a valid seal.
_SEAL = b"console session\0"
_TOKEN = b"console request\0"


@dataclass(frozen=True, slots=True)
class Session:
    """A login. `key_id` is None for a key of the configuration."""

    key_digest: bytes
    key_id: str | None
    expires_at: int  # seconds since 1970

    def seal(self, secret: bytes) -> str:
        """Return the session as the value of a cookie."""
        content = _FIXED.pack(self.expires_at, self.key_digest) + (self.key_id or "").encode()
        return base64.urlsafe_b64encode(_mac(secret, _SEAL, content) + content).decode()

    @classmethod
    def unseal(cls, secret: bytes, text: str, now: float) -> Self | None:
        """Return the session in a cookie; None if it is forged, damaged or has expired."""
        try:
            sealed = base64.b64decode(text, b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        seal, content = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, _mac(secret, _SEAL, content)):
            return None
        expires_at, key_digest = _FIXED.unpack_from(content)
        if now >= expires_at:
            return None
        return cls(key_digest, content[_FIXED.size :].decode() or None, expires_at)


def request_token(secret: bytes, cookie: str) -> str:
    """Return the token that requests of a session's pages must have, against forged requests."""
    return _mac(secret, _TOKEN, cookie.encode()).hex()


def _mac(secret: bytes, purpose: bytes, content: bytes) -> bytes:
    return hmac.digest(secret, purpose + content, "sha256")
