"""The callers of access tokens: verified once, then found by the digest of the token."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from app.auth.entry import Entry
from app.auth.owner_store import OwnerStore
from app.auth.presented_key import invalid_key
from app.auth.principal import Owner, Principal
from app.auth.tokens.key_set import KeySet
from app.auth.tokens.provider import IdentityProvider
from app.auth.tokens.provider_fetch import KeyFetch
from app.auth.tokens.verification import (
    TokenHead,
    expiry,
    principal_of,
    read_claims,
    read_head,
)
from app.database import DatabaseError
from app.errors import ServiceUnavailable
from app.settings import JwtSettings, LimitSettings

if TYPE_CHECKING:
    import jwt

CACHE_SIZE = 10_000
# Delay until a changed record of an owner applies to callers that are cached.
OWNERS_S = 5.0


@dataclass(frozen=True, slots=True)
class _Verified:
    entry: Entry
    head: TokenHead
    key: "jwt.PyJWK"


class TokenCallers:
    """Finds the caller of an access token."""

    def __init__(
        self,
        providers: Sequence[JwtSettings],
        owners: OwnerStore,
        *,
        limits: Callable[[], LimitSettings],
        fetch: Callable[[JwtSettings], Callable[[], Awaitable[KeySet]]] = KeyFetch,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limits` returns those of a provider without its own; `fetch` makes fetches of keys."""
        self._providers = {
            one.issuer: IdentityProvider(
                one, fetch(one), on_keys=self._drop_revoked, monotonic=monotonic
            )
            for one in providers
        }
        self._store = owners
        self._limits = limits
        self._now = now
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()
        # Records of the owners of cached callers; None: an owner without one.
        self._owners: dict[str, Owner | None] = {}

    def recall(self, digest: bytes) -> Entry | None:
        """Return the entry of a token by its digest; None: it is not cached."""
        found = self._verified.get(digest)
        if found is None:
            return None
        if self._now() >= found.entry.until:
            del self._verified[digest]
            return None
        self._verified.move_to_end(digest)
        return found.entry

    async def look_up(self, token: bytes, digest: bytes) -> Entry:
        """Verify a token and return its entry. Raises InvalidApiKey and ServiceUnavailable."""
        head = read_head(token)
        provider = self._providers.get(head.issuer)
        if provider is None:
            raise invalid_key()
        key = await provider.find_key(head.kid, head.algorithm)
        claims = read_claims(token, key, provider.settings, provider.settings.audience)
        principal = principal_of(claims, provider.settings, self._limits())
        owner = await self._owner(principal.owner_name)
        entry = Entry(replace(principal, owner=owner), False, expiry(claims, provider.settings))
        if self._is_revoked(head, key):  # while the owner was read
            raise invalid_key()
        self._verified[digest] = _Verified(entry, head, key)
        if len(self._verified) > CACHE_SIZE:
            self._verified.popitem(last=False)
        return entry

    async def _owner(self, name: str) -> Owner | None:
        if not name:
            return None
        if name not in self._owners:
            try:
                found = await self._store.records([name])
            except DatabaseError:
                raise ServiceUnavailable(
                    "access tokens cannot be checked at the moment; try again"
                ) from None
            self._owners[name] = found.get(name)
        return self._owners[name]

    def drop_all(self) -> None:
        """Verify every token again at its next use: the limits have changed."""
        self._verified.clear()

    def _drop_revoked(self) -> None:
        """Drop the callers whose provider has withdrawn the key of their token."""
        is_revoked = cache(self._is_revoked)  # many tokens have few keys
        self._drop(lambda one: is_revoked(one.head, one.key))

    def _is_revoked(self, head: TokenHead, key: "jwt.PyJWK") -> bool:
        """Return whether the key of a token is withdrawn, or its name another key's by now."""
        found = self._providers[head.issuer].keys.find(head.kid, head.algorithm)
        return found is None or found.key != key.key

    def _drop(self, outdated: Callable[[_Verified], bool]) -> None:
        for digest, verified in tuple(self._verified.items()):
            if outdated(verified):
                del self._verified[digest]

    # Background work

    async def run(self) -> None:
        """Fetch keys and read owners again until canceled."""
        async with asyncio.TaskGroup() as tasks:
            for provider in self._providers.values():
                tasks.create_task(provider.run(), name="refresh public keys")
            while True:
                await asyncio.sleep(OWNERS_S)
                await self.read_owners()

    async def read_owners(self) -> None:
        """Apply changed records of owners to callers that are cached."""
        used = {one.entry.principal.owner_name for one in self._verified.values()} - {""}
        try:
            found = await self._store.records(used) if used else {}
        except DatabaseError:
            return
        self._owners = {name: found.get(name) for name in used}
        self._drop(lambda one: self._is_outdated(one.entry.principal))

    def _is_outdated(self, caller: Principal) -> bool:
        """Return whether a caller has another record of its owner than the one read last."""
        name = caller.owner_name
        return name in self._owners and caller.owner != self._owners[name]

    async def close(self) -> None:
        """Cancel fetches under way; call it after `run` has ended."""
        for provider in self._providers.values():
            await provider.close()
