"""Reads the claims of a verified token. Pure."""

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from app.auth.owner_store import checked_owner_name
from app.auth.principal import Role
from app.errors import InvalidApiKey
from app.settings import EMAIL_CLAIM

# Characters of a caller's ID, as the ledger stores it.
MAX_ID = 64
_PLAIN_SUBJECT = re.compile(r"[A-Za-z0-9._@:/|+-]+")
_HALF = re.compile("[\ud800-\udfff]")
_RANKS = tuple(Role)


class UnusableClaim(InvalidApiKey):
    """A claim is missing, or has another form than the settings need."""

    def __init__(self, claim: str) -> None:
        super().__init__(f"the access token has no usable claim {claim}")
        self.claim = claim


def find_claim(claims: Mapping[str, Any], claim: str) -> object:
    """Return the value of a claim, by its name or by a path of names; None: there is none."""
    value: object = claims
    for name in claim[1:].split("/") if claim.startswith("/") else [claim]:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def text_claim(claims: Mapping[str, Any], claim: str) -> str:
    """Return a text. Raises UnusableClaim."""
    value = find_claim(claims, claim)
    # JSON can have half a character, which is no text.
    if not isinstance(value, str) or not value or _HALF.search(value):
        raise UnusableClaim(claim)
    return value


def check_email(claims: Mapping[str, Any], *named: str | None) -> None:
    """Check that the provider vouches for the address, if it is one of the named claims.

    Providers let people enter any. Raises UnusableClaim.
    """
    if not EMAIL_CLAIM.isdisjoint(named) and claims.get("email_verified") is not True:
        raise UnusableClaim("email_verified")


def owner_claim(claims: Mapping[str, Any], claim: str) -> str:
    """Return the name of an owner. Raises UnusableClaim."""
    try:
        return checked_owner_name(text_claim(claims, claim))
    except ValueError:
        raise UnusableClaim(claim) from None


def role_claim(claims: Mapping[str, Any], claim: str, roles: Mapping[str, str]) -> Role | None:
    """Return the most powerful role of the names in a claim; None: no name has one."""
    value = find_claim(claims, claim)
    names = value if isinstance(value, list) else [value]
    found = [Role(roles[name]) for name in names if isinstance(name, str) and name in roles]
    return max(found, key=_RANKS.index, default=None)


def caller_id(provider: str, subject: str) -> str:
    """Return a caller's ID: its own words where they fit, else their digest."""
    plain = f"{provider}:{subject}"
    if len(plain) <= MAX_ID and _PLAIN_SUBJECT.fullmatch(subject):
        return plain
    return f"{provider}:#{sha256(subject.encode()).hexdigest()[:32]}"
