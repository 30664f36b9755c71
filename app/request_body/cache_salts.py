"""Cache salts: they decide which tenants share vLLM's prefix cache; by default none do.

A tenant that shares a prefix cache can infer the prompts of others from the time to first token
(CVE-2025-46570). vLLM separates caches by `cache_salt`, a member of the request. The gateway sets
it to an HMAC of the tenant, whatever the client sent, so that no client can name another's salt.
"""

import hmac
from collections.abc import Callable
from typing import Literal

from app.auth import Principal

Isolation = Literal["key", "owner", "none"]
# More tenants than are active at a time; beyond it, all salts are computed again.
MAX_SALTS = 10_000
# 128 bits: vLLM takes up to 128 characters, without @ / \ and NUL.
SALT_BYTES = 16


class CacheSalts:
    """Computes salts, the same at every gateway with the same secret."""

    def __init__(self, secret: Callable[[], bytes], most: int = MAX_SALTS) -> None:
        """`secret` returns another value once the secret that the gateways share is known."""
        self.secret = secret
        self._most = most
        self._used = secret()
        self._known: dict[tuple[str, str], bytes] = {}

    def salt(self, isolation: Isolation, principal: Principal) -> bytes | None:
        """Return the salt of a tenant as a JSON string; None: tenants share the cache."""
        if isolation == "none":
            return None
        if isolation == "owner" and principal.owner_name:
            tenant = ("owner", principal.owner_name)
        else:
            tenant = ("key", principal.id)
        secret = self.secret()
        if secret is not self._used or len(self._known) > self._most:
            self._known.clear()
            self._used = secret
        salt = self._known.get(tenant)
        if salt is None:
            mac = hmac.digest(secret, "\0".join(tenant).encode(errors="surrogatepass"), "sha256")
            salt = self._known[tenant] = b'"%s"' % mac[:SALT_BYTES].hex().encode()
        return salt
