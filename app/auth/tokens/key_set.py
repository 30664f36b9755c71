"""The public keys of an identity provider (JWKS, RFC 7517). Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

MAX_KEYS = 100
# NIST SP 800-131A: shorter ones are broken.
MIN_RSA_BITS = 2048
# What a key must be for each algorithm: its type, and for curves its curve.
_FITTING = {
    **{f"{family}{bits}": ("RSA", None) for family in ("RS", "PS") for bits in (256, 384, 512)},
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", None),
}


class KeySetError(ValueError):
    """A document holds no usable keys."""


class _Document(msgspec.Struct):
    keys: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Key:
    kid: str
    algorithm: str
    key: jwt.PyJWK


@dataclass(frozen=True, slots=True)
class KeySet:
    """The keys of a provider that verify signatures of the allowed algorithms."""

    _keys: Sequence[_Key] = ()

    @classmethod
    def parse(cls, document: bytes, algorithms: Sequence[str]) -> Self:
        """Return the keys in a document; those for anything else are left out. Raises KeySetError.

        A symmetric key is never used: whoever knows it can sign.
        """
        try:
            found = msgspec.json.decode(document, type=_Document).keys
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise KeySetError("it is not a list of keys in JSON") from error
        if len(found) > MAX_KEYS:
            raise KeySetError(f"it has over {MAX_KEYS} keys")
        keys = [key for jwk in found for key in _usable(jwk, algorithms)]
        if not keys:
            raise KeySetError(f"it has no key for {', '.join(algorithms)}")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, kid: str | None, algorithm: str) -> jwt.PyJWK | None:
        """Return the key of a token; without a `kid`, the only one for its algorithm."""
        fitting = [key for key in self._keys if key.algorithm == algorithm]
        if kid is not None:
            fitting = [key for key in fitting if key.kid == kid]
        return fitting[0].key if len(fitting) == 1 else None


def _usable(jwk: dict[str, Any], algorithms: Sequence[str]) -> list[_Key]:
    """Return the key once for each allowed algorithm that it fits."""
    kid, named = jwk.get("kid", ""), jwk.get("alg")
    if jwk.get("use", "sig") != "sig" or not isinstance(kid, str):
        return []
    fitting = []
    for algorithm in algorithms:
        kind, curve = _FITTING[algorithm]
        if named not in (None, algorithm) or jwk.get("kty") != kind:
            continue
        if curve is not None and jwk.get("crv") != curve:
            continue
        try:
            key = jwt.PyJWK(jwk, algorithm)
        except (jwt.PyJWTError, ValueError, TypeError):
            continue
        if isinstance(key.key, RSAPublicKey) and key.key.key_size < MIN_RSA_BITS:
            continue
        fitting.append(_Key(kid, algorithm, key))
    return fitting
