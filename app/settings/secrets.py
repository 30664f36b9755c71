"""Secrets: the settings that hold one, and keys, of which only digests are kept."""

import hashlib
from typing import Annotated

from pydantic import BeforeValidator, ValidationInfo
from pydantic_settings import NoDecode

from app.settings.source import PREFIX, Place

# Read from the environment or .env only, never from a file that is copied and committed.
SECRETS = frozenset({"api_keys", "admin_key", "metrics_key"})
SECTION_SECRETS = frozenset({("alerts", "webhook_secret"), ("capture", "encryption_keys")})
MIN_KEY_LENGTH = 20
# Prefix of every key in the key store, and of no key in the configuration.
STORED_KEY_PREFIX = "sk-gw-"


def variable_name(place: Place) -> str:
    """Return the environment variable of a setting: GATEWAY_ALERTS__WEBHOOK_SECRET."""
    return PREFIX + "__".join(str(part).upper() for part in place)


def misplaced_secret(*place: str) -> str:
    """Return the fault of a secret in the file."""
    return f"belongs in the environment or .env: {variable_name(place)}"


def digest(key: bytes) -> bytes:
    """Return the SHA-256 of a key. That is safe for random keys, and not for passwords."""
    return hashlib.sha256(key).digest()


def _hash_keys(value: object) -> object:
    """Turn comma-separated keys into digests, so that no plain key stays in memory."""
    if not isinstance(value, str):
        return value
    keys = [key.strip() for key in value.split(",") if key.strip()]
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY_LENGTH:
            raise ValueError(f"key {number} has fewer than {MIN_KEY_LENGTH} characters")
        if key[0] in "\"'" or key[-1] in "\"'":
            raise ValueError(f"key {number} begins or ends with a quote, which would be part of it")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ValueError(f"key {number} holds a character that a header cannot carry")
    return tuple(digest(key.encode()) for key in keys)


def _hash_key(value: object) -> object:
    """Turn a key into its digest. An empty value is a fault, not the absence of a key."""
    if not isinstance(value, str):
        return value
    digests = _hash_keys(value)
    if not isinstance(digests, tuple) or len(digests) != 1:
        raise ValueError("must be one key, and not empty")
    return digests[0]


def _refuse_stored_keys(value: object, info: ValidationInfo) -> object:
    """Refuse keys of the key store: they would stay valid after they are disabled or deleted."""
    keys = value.split(",") if isinstance(value, str) else ()
    if any(key.strip().startswith(STORED_KEY_PREFIX) for key in keys):
        raise ValueError(
            f"holds a key of the key store ({STORED_KEY_PREFIX}…), which would stay valid after "
            f"it is disabled or deleted. The gateway accepts stored keys without it, and commands "
            f"read an admin key from GATEWAY_KEY: unset {variable_name((str(info.field_name),))}"
        )
    return value


_NOT_STORED = BeforeValidator(_refuse_stored_keys)
KeyDigests = Annotated[tuple[bytes, ...], NoDecode, BeforeValidator(_hash_keys), _NOT_STORED]
KeyDigest = Annotated[bytes | None, NoDecode, BeforeValidator(_hash_key), _NOT_STORED]
