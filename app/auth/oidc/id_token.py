"""Reads verified ID tokens and logout tokens (OpenID Connect Core, Back-Channel Logout). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

from app.auth.principal import Role
from app.auth.tokens import (
    caller_id,
    check_email,
    find_claim,
    owner_claim,
    role_claim,
    text_claim,
)
from app.errors import InvalidApiKey
from app.settings import OidcSettings

LOGOUT_EVENT = "http://schemas.openid.net/event/backchannel-logout"
# Age of a logout token that is accepted, in seconds.
MAX_LOGOUT_AGE_S = 300
MAX_NAME = 200
_NAMES = ("name", "preferred_username", "email")


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Who has signed in, and as what."""

    id: str  # such as sso:alice
    name: str  # only shown; two people may have the same
    role: Role
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedIn:
    """A successful sign-in; `issued_at` is in seconds since 1970, by the provider's clock."""

    person: Person
    subject: str
    provider_session: str | None
    issued_at: int
    id_token: str


@dataclass(frozen=True, slots=True)
class LogoutNotice:
    """The sessions that the provider has ended: of a subject, a session of its, or both."""

    subject: str | None
    provider_session: str | None
    issued_at: int


def check_id_token(claims: Mapping[str, Any], settings: OidcSettings, nonce: str) -> None:
    """Check what an ID token must fulfill besides a verified token. Raises InvalidApiKey."""
    found = claims.get("nonce")
    if not isinstance(found, str) or not found.isascii() or not compare_digest(found, nonce):
        raise InvalidApiKey("it is of another sign-in (nonce)")
    audience, party = claims.get("aud"), claims.get("azp")
    if party is None and isinstance(audience, list) and len(audience) > 1:
        raise InvalidApiKey("it is for several clients and names none (azp)")
    if party is not None and party != settings.client_id:
        raise InvalidApiKey("it is for another client (azp)")


def person_of(claims: Mapping[str, Any], settings: OidcSettings) -> Person | None:
    """Return who has signed in; None: no claim gives them a role. Raises UnusableClaim."""
    check_email(claims, settings.role_claim, settings.owner_claim)
    id_ = caller_id(settings.name, text_claim(claims, settings.subject_claim))
    role = role_claim(claims, settings.role_claim, settings.roles)
    if role is None:
        return None
    owner = id_ if settings.owner_claim is None else owner_claim(claims, settings.owner_claim)
    return Person(id=id_, name=_name(claims) or id_, role=role, owner=owner)


def missing_claims(claims: Mapping[str, Any], settings: OidcSettings) -> bool:
    """Return whether a claim that the settings name is not there."""
    named = [settings.subject_claim, settings.role_claim]
    if settings.owner_claim is not None:
        named.append(settings.owner_claim)
    return any(find_claim(claims, name) is None for name in named)


def logout_notice(claims: Mapping[str, Any], now: float) -> LogoutNotice:
    """Return what a verified logout token ends. Raises InvalidApiKey."""
    events = claims.get("events")
    if not isinstance(events, dict) or not isinstance(events.get(LOGOUT_EVENT), dict):
        raise InvalidApiKey("it is no logout token (events)")
    if "nonce" in claims:
        raise InvalidApiKey("it is no logout token (nonce)")
    issued_at = int(claims["iat"])
    if issued_at < now - MAX_LOGOUT_AGE_S:
        raise InvalidApiKey("it is too old")
    notice = LogoutNotice(optional_text(claims, "sub"), optional_text(claims, "sid"), issued_at)
    if notice.subject is None and notice.provider_session is None:
        raise InvalidApiKey("it names no session")
    return notice


def optional_text(claims: Mapping[str, Any], claim: str) -> str | None:
    """Return the text of a claim that need not be there. Raises UnusableClaim."""
    return text_claim(claims, claim) if claims.get(claim) is not None else None


def _name(claims: Mapping[str, Any]) -> str:
    for claim in _NAMES:
        name = claims.get(claim)
        if isinstance(name, str) and name.strip() and name.isprintable():
            return name.strip()[:MAX_NAME]
    return ""
