"""Access tokens of identity providers as API keys: verified here, by the providers' public keys.

`verification` checks a token, `claims` reads who it is of, `key_set` holds public keys, `provider`
keeps them, `provider_fetch` fetches them, `token_callers` keeps what has been verified. Imported
only where `auth.jwt` or `console.oidc` is set.
"""

from app.auth.tokens.claims import (
    UnusableClaim,
    caller_id,
    check_email,
    find_claim,
    owner_claim,
    role_claim,
    text_claim,
)
from app.auth.tokens.key_set import KeySet
from app.auth.tokens.provider import IdentityProvider
from app.auth.tokens.provider_fetch import (
    FetchError,
    address_in,
    connected,
    discover,
    fetch_keys,
    read_object,
    send,
)
from app.auth.tokens.token_callers import TokenCallers
from app.auth.tokens.verification import read_claims, read_head

__all__ = (
    "FetchError",
    "IdentityProvider",
    "KeySet",
    "TokenCallers",
    "UnusableClaim",
    "address_in",
    "caller_id",
    "check_email",
    "connected",
    "discover",
    "fetch_keys",
    "find_claim",
    "owner_claim",
    "read_claims",
    "read_head",
    "read_object",
    "role_claim",
    "send",
    "text_claim",
)
