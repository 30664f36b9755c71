"""API keys: how they come in, how they are compared.

Only SHA-256 digests of keys are kept. Keys are random and long, so a fast hash is right (a slow
one guards guessable passwords); a look-up by whole digest tells nothing through its timing, since
what an attacker controls is the input of the hash, not the digest.
"""

import hmac
from collections.abc import Collection, Iterable, Sequence

from app.auth.principal import ANONYMOUS, Principal
from app.errors import InvalidApiKey
from app.settings import digest

# Longer than any key that we accept from the configuration; not worth a hash.
MAX_KEY_LENGTH = 1024


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the key of a request, from Authorization: Bearer or x-api-key.

    Raises InvalidApiKey when there is none, or more than one.
    """
    found: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() != b"bearer":
                raise InvalidApiKey("the Authorization header must be `Bearer <key>`")
        elif name == b"x-api-key":
            key = value
        else:
            continue
        key = key.strip()
        if found is not None and not hmac.compare_digest(found, key):
            raise InvalidApiKey("the request has two different API keys")
        found = key
    if not found:
        raise InvalidApiKey(
            "no API key: send `Authorization: Bearer <key>` or `x-api-key: <key>`", "missing"
        )
    return found


class Authenticator:
    """Decides who may use the data plane."""

    def __init__(self, digests: Collection[bytes], *, enabled: bool) -> None:
        self._enabled = enabled
        self._principals = {one: Principal(f"key-{one.hex()[:8]}") for one in digests}

    def authenticate(self, headers: Sequence[tuple[bytes, bytes]]) -> Principal:
        """Return who sent these headers. Raises InvalidApiKey."""
        if not self._enabled:
            return ANONYMOUS
        key = presented_key(headers)
        principal = self._principals.get(digest(key)) if len(key) <= MAX_KEY_LENGTH else None
        if principal is None:
            raise InvalidApiKey("the API key is not valid")
        return principal
