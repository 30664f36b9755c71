"""Encrypts captures: AES-256-GCM, bound to the row that they are stored in.

A sealed text is `version, key ID, nonce, ciphertext with tag`. The key ID, the first bytes of the
key's SHA-256, finds the key after a rotation. The row's facts are authenticated with the text, so
that a writer to the database cannot show one tenant's capture as another's. Nonces are
random: NIST SP 800-38D (8.3) allows 2**32 texts by one key, a thousand a second for 49 days.
"""

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from app.settings import CaptureSettings

if TYPE_CHECKING:
    pass

_VERSION = b"\x01"
_ID_BYTES = 4
_NONCE_BYTES = 12
_HEAD_BYTES = len(_VERSION) + _ID_BYTES + _NONCE_BYTES


class Unreadable(Exception):
    """A sealed text cannot be opened: its key is not here, or it was changed."""


class Sealer:
    """Encrypts by the first of its keys, and decrypts by any."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # 8 MiB

        ids = [hashlib.sha256(key).digest()[:_ID_BYTES] for key in keys]
        self._first = ids[0]
        self._ciphers: dict[bytes, AESGCM] = {
            key_id: AESGCM(key) for key_id, key in zip(ids, keys, strict=True)
        }

    @classmethod
    def of(cls, settings: CaptureSettings) -> Self | None:
        """Return the sealer of a configuration; None: it has no keys."""
        keys = settings.secret_keys()
        return cls(keys) if keys else None

    def seal(self, text: bytes, row: bytes) -> bytes:
        """Return a text encrypted, for the row with these facts."""
        nonce = os.urandom(_NONCE_BYTES)
        head = _VERSION + self._first + nonce
        return head + self._ciphers[self._first].encrypt(nonce, text, row)

    def open(self, sealed: bytes, row: bytes) -> bytes:
        """Return the text of a row. Raises Unreadable."""
        from cryptography.exceptions import InvalidTag

        key_id, nonce = sealed[1 : 1 + _ID_BYTES], sealed[1 + _ID_BYTES : _HEAD_BYTES]
        cipher = self._ciphers.get(key_id)
        if sealed[:1] != _VERSION or cipher is None:
            raise Unreadable("its key is not among GATEWAY_CAPTURE__ENCRYPTION_KEYS")
        try:
            return cipher.decrypt(nonce, sealed[_HEAD_BYTES:], row)
        except (InvalidTag, ValueError):  # a text that was cut has no whole nonce
            raise Unreadable("it is not as it was stored") from None
