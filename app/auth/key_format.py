"""The format of a key: `sk-gw-<id>-<secret><checksum>`, all base62.

The last six characters are the CRC-32 of everything before them, as in GitHub's tokens
(https://github.blog/engineering/platform-security/behind-githubs-new-authentication-token-formats/):
a key that was mistyped, truncated or invented is refused without a database query. The ID is
public; the secret has 256 random bits.
"""

import re
import secrets
import string
import zlib
from dataclasses import dataclass, field

from app.settings import STORED_KEY_PREFIX, digest

ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
ID_LENGTH = 10
SECRET_LENGTH = 43  # 62**43 is just over 2**256
CHECKSUM_LENGTH = 6  # 62**6 is just over 2**35
_DIGITS = frozenset(ALPHABET)
_FORM = re.compile(
    rb"%b([0-9A-Za-z]{%d})-[0-9A-Za-z]{%d}"
    % (re.escape(STORED_KEY_PREFIX.encode()), ID_LENGTH, SECRET_LENGTH + CHECKSUM_LENGTH)
)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just created; `text` is not stored and cannot be shown again."""

    id: str
    text: str = field(repr=False)

    @property
    def digest(self) -> bytes:
        """The digest of the key, which is stored in place of its text."""
        return digest(self.text.encode())


def new_key(key_id: str | None = None) -> NewKey:
    """Return a new random key, or a new secret for the key `key_id`."""
    key_id = key_id or _random(ID_LENGTH)
    text = f"{STORED_KEY_PREFIX}{key_id}-{_random(SECRET_LENGTH)}"
    return NewKey(key_id, text + checksum(text.encode()).decode())


def id_of(key: bytes) -> str | None:
    """Return the ID in a key; None if its format or checksum is wrong."""
    match = _FORM.fullmatch(key)
    if match is None or checksum(key[:-CHECKSUM_LENGTH]) != key[-CHECKSUM_LENGTH:]:
        return None
    return match[1].decode()


def is_id(text: str) -> bool:
    """Return whether a text has the format of a key's ID."""
    return len(text) == ID_LENGTH and set(text) <= _DIGITS


def checksum(text: bytes) -> bytes:
    """Return the CRC-32 of a text as six base62 digits."""
    rest = zlib.crc32(text)
    digits = []
    for _ in range(CHECKSUM_LENGTH):
        rest, digit = divmod(rest, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits)).encode()


def _random(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))
