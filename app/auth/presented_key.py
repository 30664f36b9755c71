"""Reads the API key of a request from its headers."""

import hmac

from app.errors import Headers, InvalidApiKey

_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
# Longer than any key that the configuration accepts; such keys are refused without a hash.
MAX_KEY_LENGTH = 1024
# An access token with many groups has several thousand.
MAX_TOKEN_LENGTH = 8192


def presented_key(headers: Headers) -> bytes:
    """Return the key of a request, from `Authorization: Bearer` or `x-api-key`.

    Raises InvalidApiKey if there is none, two different ones, or an impossible one.
    """
    by_name = dict(headers)
    usual = by_name.get(b"authorization", b"")
    # As most clients send it: a single credential, and no header twice.
    if len(by_name) == len(headers) and b"x-api-key" not in by_name and usual[:7] == b"Bearer ":
        words = usual.split(None, 2)
        if len(words) == 2 and len(words[1]) <= MAX_KEY_LENGTH:
            return words[1]
    return read_any_key(headers)


def read_any_key(headers: Headers) -> bytes:
    """Return the key of a request whose headers are unusual. Raises InvalidApiKey."""
    found: bytes | None = None
    for name, value in [pair for pair in headers if pair[0] in _CREDENTIALS]:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() != b"bearer":
                raise InvalidApiKey("the Authorization header must be `Bearer <key>`")
        else:
            key = value
        key = key.strip()
        if found is not None and not hmac.compare_digest(found, key):
            raise InvalidApiKey("the request has two different API keys")
        found = key
    if not found:
        raise InvalidApiKey(
            "no API key: send `Authorization: Bearer <key>` or `x-api-key: <key>`", "missing"
        )
    bound = MAX_TOKEN_LENGTH if is_token(found) else MAX_KEY_LENGTH
    if len(found) > bound or len(found.split(None, 1)) != 1:
        raise invalid_key()
    return found


def is_token(key: bytes) -> bool:
    """Return whether a key has the form of a signed access token (JWT)."""
    return key.startswith(b"eyJ") and key.count(b".") == 2


def invalid_key() -> InvalidApiKey:
    """Return the error for a key that is not valid, without saying why."""
    return InvalidApiKey("the API key is not valid")
