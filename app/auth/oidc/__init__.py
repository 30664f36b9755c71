"""Sign-in of people by OpenID Connect: the console is a client of an identity provider.

    relying_party    the two steps of a sign-in, and what the provider sends for a sign-out
    id_token         what a verified token says, and what else it must fulfill
    discovery        the provider's addresses and keys
    sessions         who has signed in, in the database

Imported only where `console.oidc` is set.
"""

from app.auth.oidc.discovery import find_provider_fault
from app.auth.oidc.id_token import LogoutNotice, Person, SignedIn
from app.auth.oidc.relying_party import (
    Attempt,
    RelyingParty,
    SignInFailed,
    SignInRefused,
)
from app.auth.oidc.sessions import PersonSession, PersonSessions

__all__ = (
    "Attempt",
    "LogoutNotice",
    "Person",
    "PersonSession",
    "PersonSessions",
    "RelyingParty",
    "SignInFailed",
    "SignInRefused",
    "SignedIn",
    "find_provider_fault",
)
