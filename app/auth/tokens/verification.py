"""Verifies access tokens (JWT, RFC 7519 and 8725), and reads who sends them. Pure."""

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jwt
from pydantic import TypeAdapter, ValidationError

from app.auth.presented_key import invalid_key
from app.auth.principal import Allowed, Principal, Role
from app.auth.tokens.claims import (
    UnusableClaim,
    caller_id,
    check_email,
    find_claim,
    owner_claim,
    role_claim,
    text_claim,
)
from app.auth.validation import Pattern
from app.errors import InvalidApiKey
from app.money import optional_nano
from app.settings import JwtSettings, LimitSettings, ProviderSettings

MAX_MODELS = 1000
_MODELS: TypeAdapter[list[str]] = TypeAdapter(list[Pattern])
# What PyJWT raises for hostile headers and claims, besides its own errors.
_FAULTS = (ValueError, TypeError, OverflowError, RecursionError, binascii.Error, KeyError)


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


def read_claims(
    token: bytes,
    key: jwt.PyJWK,
    settings: ProviderSettings,
    audience: str,
    required: Sequence[str] = (),
    noun: str = "the access token",
) -> Mapping[str, Any]:
    """Return the claims of a token that is valid now. Raises InvalidApiKey, with the reason.

    `noun` is what messages call the token.

    The reason is told to whom the provider has given the token: the signature comes first.
    """
    try:
        claims: Mapping[str, Any] = jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],
            audience=audience,
            issuer=settings.issuer,
            leeway=settings.leeway_s,
            options={"require": ["exp", "iss", "aud", *required]},
        )
    except jwt.ExpiredSignatureError:
        raise InvalidApiKey(f"{noun} has expired") from None
    except jwt.ImmatureSignatureError:
        raise InvalidApiKey(f"{noun} is not valid yet") from None
    except jwt.InvalidAudienceError:
        raise InvalidApiKey(f"{noun} is for another audience") from None
    except jwt.MissingRequiredClaimError as error:
        raise InvalidApiKey(f"{noun} has no {error.claim}") from None
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
    check_email(claims, settings.owner_claim, settings.role_claim, settings.models_claim)
    owner = "" if settings.owner_claim is None else owner_claim(claims, settings.owner_claim)
    role = None
    if settings.role_claim is not None:
        role = role_claim(claims, settings.role_claim, settings.roles)
    return Principal(
        caller_id(settings.name, text_claim(claims, settings.subject_claim)),
        role or Role.CLIENT,
        default if settings.limits is None else settings.limits,
        models=Allowed.of(_models(claims, settings)),
        daily_tokens=settings.daily_tokens,
        monthly_tokens=settings.monthly_tokens,
        daily_cost_nano=optional_nano(settings.daily_cost),
        monthly_cost_nano=optional_nano(settings.monthly_cost),
        owner_name=owner,
    )


def _models(claims: Mapping[str, Any], settings: JwtSettings) -> list[str]:
    if settings.models_claim is None:
        return list(settings.models)
    value = find_claim(claims, settings.models_claim)
    try:
        models = _MODELS.validate_python([value] if isinstance(value, str) else value)
    except ValidationError:
        raise UnusableClaim(settings.models_claim) from None
    if len(models) > MAX_MODELS:
        raise UnusableClaim(settings.models_claim)
    return models
