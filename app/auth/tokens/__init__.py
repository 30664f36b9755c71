"""Access tokens of identity providers as API keys: verified here, by the providers' public keys.

`verification` checks a token and reads who sends it, `key_set` holds public keys, `provider`
fetches them, `token_callers` keeps what has been verified. Imported only where `auth.jwt` is set.
"""

from app.auth.tokens.token_callers import TokenCallers

__all__ = ("TokenCallers",)
