"""Sessions of the console: who has logged in, sealed into a cookie.

A session names a key by its digest and ends with it: each request looks the key up again. One of a
person who came by an identity provider has a token instead, which is looked up in the database.
Nothing is kept in memory, so that sessions outlive a restart of the gateway, and several gateways
with one database share them. The seal is HMAC-SHA256 with a secret of the database.
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
# Stands for the ID of a key in the session of a person; no key has it.
PERSON = "person"


@dataclass(frozen=True, slots=True)
class Session:
    """A login. `key_id` is None for a key of the configuration."""

    key_digest: bytes  # the token of a person's session
    key_id: str | None
    expires_at: int  # seconds since 1970

    def seal(self, secret: bytes) -> str:
        """Return the session as the value of a cookie."""
        content = _FIXED.pack(self.expires_at, self.key_digest) + (self.key_id or "").encode()
        return seal(secret, _SEAL, content)

    @classmethod
    def unseal(cls, secret: bytes, text: str, now: float) -> Self | None:
        """Return the session in a cookie; None if it is forged, damaged or has expired."""
        content = unseal(secret, _SEAL, text)
        if content is None:
            return None
        expires_at, key_digest = _FIXED.unpack_from(content)
        if now >= expires_at:
            return None
        return cls(key_digest, content[_FIXED.size :].decode() or None, expires_at)


def seal(secret: bytes, purpose: bytes, content: bytes) -> str:
    """Return content that only gateways can have made, as the value of a cookie."""
    return base64.urlsafe_b64encode(_mac(secret, purpose, content) + content).decode()


def unseal(secret: bytes, purpose: bytes, text: str) -> bytes | None:
    """Return sealed content; None if it is forged, damaged or for another purpose."""
    try:
        sealed = base64.b64decode(text, b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    mac, content = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
    return content if hmac.compare_digest(mac, _mac(secret, purpose, content)) else None


def request_token(secret: bytes, cookie: str) -> str:
    """Return the token that requests of a session's pages must have, against forged requests."""
    return _mac(secret, _TOKEN, cookie.encode()).hex()


def _mac(secret: bytes, purpose: bytes, content: bytes) -> bytes:
    return hmac.digest(secret, purpose + content, "sha256")
