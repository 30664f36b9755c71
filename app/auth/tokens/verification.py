"""Verifies access tokens (JWT, RFC 7519 and 8725), and reads who sends them. Pure."""

import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import jwt
from pydantic import TypeAdapter, ValidationError

from app.auth.owner_store import checked_owner_name
from app.auth.presented_key import invalid_key
from app.auth.principal import Allowed, Principal, Role
from app.auth.validation import Pattern
from app.errors import InvalidApiKey
from app.settings import JwtSettings, LimitSettings

MAX_MODELS = 1000
# Characters of a caller's ID, as the ledger stores it.
MAX_ID = 64
_PLAIN_SUBJECT = re.compile(r"[A-Za-z0-9._@:/|+-]+")
_HALF = re.compile("[\ud800-\udfff]")
_MODELS: TypeAdapter[list[str]] = TypeAdapter(list[Pattern])
# What PyJWT raises for hostile headers and claims, besides its own errors.
_FAULTS = (ValueError, TypeError, OverflowError, RecursionError, binascii.Error, KeyError)
_RANKS = tuple(Role)


@dataclass(frozen=True, slots=True)
class TokenHead:
    """The claims of an unverified token about its signature: issuer, algorithm and key."""

    issuer: str
    algorithm: str
    kid: str | None


def read_head(token: bytes) -> TokenHead:
    """Return what an unverified token says of itself. Raises InvalidApiKey."""
    try:
        whole = jwt.decode_complete(token, options={"verify_signature": False})
    except (jwt.PyJWTError, *_FAULTS):
        raise invalid_key() from None
    header, issuer = whole["header"], whole["payload"].get("iss")
    algorithm, kid = header.get("alg"), header.get("kid")
    # A critical extension is one that must be understood.
    if not isinstance(issuer, str) or not isinstance(algorithm, str) or "crit" in header:
        raise invalid_key()
    if kid is not None and not isinstance(kid, str):
        raise invalid_key()
    return TokenHead(issuer, algorithm, kid)


def read_claims(token: bytes, key: jwt.PyJWK, settings: JwtSettings) -> Mapping[str, Any]:
    """Return the claims of a token that is valid now. Raises InvalidApiKey, with the reason.

    The reason is told to whom the provider has given the token: the signature comes first.
    """
    try:
        claims: Mapping[str, Any] = jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],
            audience=settings.audience,
            issuer=settings.issuer,
            leeway=settings.leeway_s,
            options={"require": ["exp", "iss", "aud"]},
        )
    except jwt.ExpiredSignatureError:
        raise InvalidApiKey("the access token has expired") from None
    except jwt.ImmatureSignatureError:
        raise InvalidApiKey("the access token is not valid yet") from None
    except jwt.InvalidAudienceError:
        raise InvalidApiKey("the access token is for another audience") from None
    except jwt.MissingRequiredClaimError as error:
        raise InvalidApiKey(f"the access token has no {error.claim}") from None
    except (jwt.PyJWTError, *_FAULTS):
        raise invalid_key() from None
    return claims


def expiry(claims: Mapping[str, Any], settings: JwtSettings) -> float:
    """Return until when a verified token is accepted, in seconds since 1970."""
    return int(claims["exp"]) + settings.leeway_s


def principal_of(
    claims: Mapping[str, Any], settings: JwtSettings, default: LimitSettings
) -> Principal:
    """Return the caller of a verified token, without the record of its owner.

    `default` are the limits where the provider's settings have none. Raises InvalidApiKey for
    claims that are missing or have another form than the settings need.
    """
    owner = ""
    if settings.owner_claim is not None:
        try:
            owner = checked_owner_name(_text(claims, settings.owner_claim))
        except ValueError:
            raise _unusable(settings.owner_claim) from None
    return Principal(
        _id(settings.name, _text(claims, settings.subject_claim)),
        _role(claims, settings),
        default if settings.limits is None else settings.limits,
        models=Allowed.of(_models(claims, settings)),
        daily_tokens=settings.daily_tokens,
        monthly_tokens=settings.monthly_tokens,
        owner_name=owner,
    )


def _id(issuer: str, subject: str) -> str:
    """Return a caller's ID: its own words where they fit, else their digest."""
    plain = f"{issuer}:{subject}"
    if len(plain) <= MAX_ID and _PLAIN_SUBJECT.fullmatch(subject):
        return plain
    return f"{issuer}:#{sha256(subject.encode()).hexdigest()[:32]}"


def _role(claims: Mapping[str, Any], settings: JwtSettings) -> Role:
    if settings.role_claim is None:
        return Role.CLIENT
    value = _find(claims, settings.role_claim)
    names = value if isinstance(value, list) else [value]
    roles = [Role(settings.roles[n]) for n in names if isinstance(n, str) and n in settings.roles]
    return max(roles, key=_RANKS.index, default=Role.CLIENT)


def _models(claims: Mapping[str, Any], settings: JwtSettings) -> list[str]:
    if settings.models_claim is None:
        return list(settings.models)
    value = _find(claims, settings.models_claim)
    try:
        models = _MODELS.validate_python([value] if isinstance(value, str) else value)
    except ValidationError:
        raise _unusable(settings.models_claim) from None
    if len(models) > MAX_MODELS:
        raise _unusable(settings.models_claim)
    return models


def _text(claims: Mapping[str, Any], claim: str) -> str:
    value = _find(claims, claim)
    # JSON can have half a character, which is no text.
    if not isinstance(value, str) or not value or _HALF.search(value):
        raise _unusable(claim)
    return value


def _find(claims: Mapping[str, Any], claim: str) -> object:
    """Return the value of a claim, by its name or by a path of names; None: there is none."""
    value: object = claims
    for name in claim[1:].split("/") if claim.startswith("/") else [claim]:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _unusable(claim: str) -> InvalidApiKey:
    return InvalidApiKey(f"the access token has no usable claim {claim}")
