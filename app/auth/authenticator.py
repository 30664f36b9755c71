"""Authenticates requests: compares presented keys with configured and stored ones.

Only SHA-256 digests of keys are stored. Keys are random and long, so a fast hash is right (a slow
one protects guessable passwords); a lookup by the whole digest leaks nothing through its timing,
since an attacker controls the input of the hash, not the digest.

Stored keys are cached. Every gateway polls the store's revision to invalidate its cache: PostgreSQL
could notify, SQLite cannot (and the command line changes it from another process), Redis is
optional, and a lost notification would need a poll anyway.
"""

import asyncio
import contextlib
import hmac
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from app.auth.digest_cache import DigestCache
from app.auth.entry import Entry
from app.auth.key_format import id_of
from app.auth.key_store import KeyStore
from app.auth.keys import ApiKey, Change, Credential
from app.auth.lookups import LookupQueueFull, LookupQueues
from app.auth.presented_key import invalid_key, is_token, presented_key
from app.auth.principal import Allowed, Owner, Principal, Role
from app.database import DatabaseBusy, DatabaseError, DatabaseUnavailable
from app.errors import Headers, InvalidApiKey, PermissionDenied, ServiceUnavailable
from app.head_facts import HeadFacts
from app.settings import NO_LIMITS, LimitSettings, digest

if TYPE_CHECKING:  # imported only where access tokens are accepted
    from app.auth.tokens import TokenCallers

log = logging.getLogger(__name__)

# IDs in a line about changes by a command.
MAX_LOGGED = 20
# Cached valid keys, and cached digests of unknown keys.
CACHE_SIZE = 10_000
# Lifetime of a cached unknown digest, unless a change removes it earlier.
UNKNOWN_TTL_S = 10.0
# IDs of keys that are kept in memory, about 100 bytes each; if there are more, none are.
MAX_IDS = 100_000
POLL_S = 0.5
FLUSH_S = 60.0


def ignore_cut(key_id: str) -> None:
    """Do nothing; the default of `on_cut`."""


class Authenticator:
    """Turns a request's headers into a Principal.

    Static keys are those of the configuration. `on_cut` terminates the requests in flight of a key,
    by its ID; it is called once per cut, after the key has stopped authenticating. `tokens`
    verifies access tokens of identity providers; None: there are none. `now` is the wall clock, by
    which keys expire; `monotonic` times everything else.
    """

    def __init__(
        self,
        store: KeyStore,
        *,
        static: Collection[bytes] = (),
        admin: bytes | None = None,
        enabled: bool = True,
        limits: LimitSettings,
        offline_grace_s: float,
        on_cut: Callable[[str], None] = ignore_cut,
        tokens: "TokenCallers | None" = None,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        # Without keys there is no caller to limit; models still have limits.
        self._anonymous = Principal("anonymous", Role.CLIENT, NO_LIMITS)
        self._root = Principal("root", Role.ADMIN, NO_LIMITS)
        self._enabled = enabled
        self._limits = limits
        self._grace_s = offline_grace_s
        self._on_cut = on_cut
        self._tokens = tokens
        self._now = now
        self._monotonic = monotonic

        self._known: DigestCache[Entry] = DigestCache(CACHE_SIZE)
        # Digests of unknown keys, with their expiry on the monotonic clock.
        self._unknown: DigestCache[float] = DigestCache(CACHE_SIZE)
        # Both caches include every change up to this revision; None: not polled yet.
        self._revision: int | None = None
        self._outdated = False  # cached keys have the limits before a reload
        # Time of the last cut by key ID, until the key is enabled or deleted.
        self._cuts: dict[str, int] = {}
        self._poll_lock = asyncio.Lock()  # an older result must not follow a newer one
        self._offline = False
        self._last_poll = monotonic()  # start of the last successful poll
        self._lookups = LookupQueues(self._read, self._cache_result)
        # The IDs of all keys that are not deleted; None: not loaded, or too many.
        self._ids: set[str] | None = None
        # Time of use of keys, not yet written to the store.
        self._used: dict[str, float] = {}
        self.replace(static, admin, limits)

    def replace(
        self, static: Collection[bytes], admin: bytes | None, limits: LimitSettings
    ) -> None:
        """Apply new keys of the configuration and new limits.

        Immediately, except for the limits of cached stored keys, which follow with the next poll:
        while the store is unavailable they cannot be read again.
        """
        if limits != self._limits:
            self._limits = limits
            self._outdated = True
            if self._tokens is not None:
                self._tokens.drop_all()
        self._static = {
            key: Principal(f"key-{key.hex()[:8]}", Role.CLIENT, limits) for key in static
        }
        self._admin = admin

    @property
    def default_limits(self) -> LimitSettings:
        """The limits of a key that has none of its own."""
        return self._limits

    @property
    def may_admit(self) -> bool:
        """False while no key can be checked: there is none but in the store, never reached yet."""
        return not self._enabled or bool(self._static) or self._revision is not None

    def recall(self, headers: Headers, facts: HeadFacts) -> Principal | None:
        """Return the caller from the cache; None if only `look_up` can tell.

        The digest of the key is noted in `facts` of these headers. Raises InvalidApiKey, and
        ServiceUnavailable after the grace period of an unavailable store.
        """
        if not self._enabled:
            return self._anonymous
        key_digest = facts.key_digest
        if key_digest is None:
            key_digest = facts.key_digest = digest(presented_key(headers))
        principal = self._static.get(key_digest)
        if principal is not None:
            return principal
        entry = self._known.get(key_digest) or self._cached(presented_key(headers), key_digest)
        return None if entry is None else self._admit(entry, admin=False)

    async def look_up(self, headers: Headers) -> Principal:
        """Return the caller from the store.

        Raises InvalidApiKey, and ServiceUnavailable if the store does not answer.
        """
        key = presented_key(headers)
        return self._admit(await self._find(key, digest(key)), admin=False)

    async def authenticate(self, headers: Headers) -> Principal:
        """Return the caller. Raises InvalidApiKey and ServiceUnavailable."""
        return self.recall(headers, HeadFacts()) or await self.look_up(headers)

    async def admin(self, headers: Headers) -> Principal:
        """Return the caller of /admin, which requires a key even if authentication is off.

        Raises InvalidApiKey, ServiceUnavailable, and PermissionDenied for a client's key.
        """
        key = presented_key(headers)
        key_digest = digest(key)
        if self._admin is not None and hmac.compare_digest(key_digest, self._admin):
            return self._root
        if key_digest in self._static:
            raise _not_for_admin()
        entry = self._cached(key, key_digest) or await self._find(key, key_digest)
        return self._admit(entry, admin=True)

    @property
    def anonymous(self) -> Principal | None:
        """The caller of every request without authentication; None: authentication is on."""
        return None if self._enabled else self._anonymous

    async def of_any_role(self, key_id: str | None, key_digest: bytes) -> Principal:
        """Return the caller of a key by its digest, as a session of the console has it.

        `key_id` is None for a key of the configuration. Raises InvalidApiKey and
        ServiceUnavailable.
        """
        if self._admin is not None and hmac.compare_digest(key_digest, self._admin):
            return self._root
        if (principal := self._static.get(key_digest)) is not None:
            return principal
        known = self._known.get(key_digest)
        if known is None and self._tokens is not None:
            known = self._tokens.recall(key_digest)
        if known is None and self._monotonic() < (self._unknown.get(key_digest) or -math.inf):
            raise invalid_key()  # a page asks again and again, after its key has gone
        return self._admit(known or await self._fetch(key_id, key_digest), admin=None)

    async def remember_token(self, key: bytes) -> None:
        """Verify an access token, by whose digest `of_any_role` then finds its caller.

        Does nothing for other keys. Raises InvalidApiKey and ServiceUnavailable.
        """
        if self._tokens is not None and is_token(key):
            await self._tokens.look_up(key, digest(key))

    def _admit(self, entry: Entry, *, admin: bool | None) -> Principal:
        """Return the principal of a valid entry. The only place that records use.

        `admin`: whether the caller must be an administrator's key; None: any role will do.
        """
        if self._offline and self._monotonic() - self._last_poll > self._grace_s:
            raise _store_unavailable()
        if entry.disabled:
            raise InvalidApiKey("the API key is disabled")
        now = self._now()
        if now >= entry.until:
            raise InvalidApiKey("the API key has expired")
        principal = entry.principal
        if admin is not None and (principal.role is not Role.CLIENT) is not admin:
            if admin:
                raise _not_for_admin()
            raise InvalidApiKey("this key is for administration only")
        self._used[principal.id] = now
        return principal

    def _cached(self, key: bytes, key_digest: bytes) -> Entry | None:
        """Return the cached entry of a secret; None: not cached. Raises InvalidApiKey."""
        entry = self._known.get(key_digest)
        if entry is not None:
            return entry
        if self._tokens is not None and is_token(key):
            return self._tokens.recall(key_digest)
        until = self._unknown.get(key_digest)
        if id_of(key) is None or (until is not None and self._monotonic() < until):
            raise invalid_key()
        return None

    # Lookups

    async def _find(self, key: bytes, key_digest: bytes) -> Entry:
        """Return the entry of a secret that is not cached."""
        if self._tokens is not None and is_token(key):
            return await self._tokens.look_up(key, key_digest)
        return await self._fetch(id_of(key), key_digest)

    async def _fetch(self, key_id: str | None, key_digest: bytes) -> Entry:
        """Return the entry of a secret from the store; `key_id` None: no stored key has it."""
        if key_id is None:
            raise invalid_key()
        while not self._offline:
            exists = self._ids is None or key_id in self._ids
            try:
                await self._lookups.wait_for_result(key_id, key_digest, exists=exists)
            except (DatabaseUnavailable, LookupQueueFull):
                raise _store_unavailable() from None
            if (entry := self._known.get(key_digest)) is not None:
                return entry
            if self._unknown.get(key_digest) is not None:
                raise invalid_key()
            # Neither: a poll invalidated the entry before this caller resumed.
        raise _store_unavailable()

    async def _read(self, key_id: str) -> tuple[int, Credential | None]:
        if self._offline:  # since it began to wait
            raise DatabaseUnavailable("the key store is unavailable")
        try:
            return await self._store.find(key_id)
        except DatabaseBusy:
            raise
        except DatabaseUnavailable as error:
            self._go_offline(error)
            raise

    def _cache_result(
        self, key_id: str, key_digest: bytes, found: tuple[int, Credential | None], final: bool
    ) -> bool:
        """Cache the result of a read; a mismatch only if it is final."""
        revision, credential = found
        entry = self._match(credential, key_digest)
        if entry is not None:
            self._known.put(key_digest, key_id, revision, entry)
        elif final:
            self._unknown.put(key_digest, key_id, revision, self._monotonic() + UNKNOWN_TTL_S)
        return final or entry is not None

    def _match(self, found: Credential | None, key_digest: bytes) -> Entry | None:
        """Return the entry of a key whose digest matches; None: it does not."""
        if found is None:
            return None
        until = _seconds(found.key.expires_ms)
        if not hmac.compare_digest(found.digest, key_digest):
            previous = found.previous_digest
            if previous is None or not hmac.compare_digest(previous, key_digest):
                return None
            until = min(until, _seconds(found.key.previous_until_ms))
        return Entry(self._principal(found.key, found.owner), found.key.disabled, until)

    def _principal(self, key: ApiKey, owner: Owner | None) -> Principal:
        return Principal(
            key.id,
            key.role,
            key.limits(self._limits),
            models=Allowed.of(key.models),
            priority=key.priority,
            weight=key.weight,
            max_wait_s=key.max_wait_s,
            daily_tokens=key.daily_tokens,
            monthly_tokens=key.monthly_tokens,
            daily_cost_nano=key.daily_cost_nano,
            monthly_cost_nano=key.monthly_cost_nano,
            fields=key.fields,
            may_load_models=key.may_load_models,
            owner_name=key.owner,
            owner=owner,
        )

    # Background work

    async def run(self) -> None:
        """Poll the store and write uses until canceled."""
        flush_at = self._monotonic() + FLUSH_S
        while True:
            try:
                await self.poll()
                if self._monotonic() >= flush_at:
                    flush_at = self._monotonic() + FLUSH_S
                    await self.flush()
            except Exception as error:  # noqa: BLE001 - polling must not end silently
                self._go_offline(error)
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Invalidate keys changed since the last poll; detect whether the store is available."""
        async with self._poll_lock:
            began = self._monotonic()
            try:
                revision, changed = await self._store.changed_since(self._revision)
                # Backwards: the database was replaced, perhaps by a backup.
                reset = self._revision is None or revision < self._revision
                ids = await self._store.ids(MAX_IDS) if reset else self._ids
            except DatabaseBusy:
                return
            except DatabaseUnavailable as error:
                self._go_offline(error)
                return
            if reset:
                self._cuts.clear()
            if reset or self._outdated:
                # Requests may precede the first poll. Their newer entries stay: the store may fail.
                keep = self._revision is None and not self._outdated
                oldest = revision if keep else math.inf
                self._known.drop_older(oldest)
                self._unknown.drop_older(oldest)
                self._lookups.outdate_all()
                self._outdated = False
            for key_id, change in changed.items():
                # Entries read since the change stay: the store may fail before the next read.
                self._known.invalidate(key_id, change.revision)
                self._unknown.invalidate(key_id, change.revision)
            self._lookups.outdate(changed)
            self._ids = _updated_ids(ids, changed)
            self._revision = revision
            self._last_poll = began
            if self._offline:
                self._offline = False
                log.info("key store available again")
            for key_id in self._record_cuts(changed):
                self._on_cut(key_id)
            _log_commands(changed)

    def _record_cuts(self, changed: Mapping[str, Change]) -> list[str]:
        """Record new cuts; return their keys, whose requests must be terminated."""
        found = []
        for key_id, change in changed.items():
            if change.cut_ms is not None and change.cut_ms != self._cuts.get(key_id):
                found.append(key_id)
            if change.cut_ms is None or change.deleted:  # a deleted key never changes again
                self._cuts.pop(key_id, None)
            else:
                self._cuts[key_id] = change.cut_ms
        return found

    def _go_offline(self, error: Exception) -> None:
        if not self._offline:
            self._offline = True
            trace = None if isinstance(error, DatabaseError) else error
            message = "key store unavailable: %s; cached keys stay valid for %g s"
            log.error(message, error, self._grace_s, exc_info=trace)

    async def flush(self) -> None:
        """Write the times of use to the store; keep them if it fails."""
        used = {key_id: at for key_id, at in self._used.items() if ":" not in key_id}
        self._used = dict(used)  # callers of access tokens are not in the store
        with contextlib.suppress(DatabaseError):
            await self._store.touch({key_id: int(at * 1000) for key_id, at in used.items()})
            for key_id, at in used.items():
                if self._used[key_id] == at:
                    del self._used[key_id]

    async def close(self) -> None:
        """Cancel running lookups and flush; call it after `run` has ended."""
        await self._lookups.close()
        await self.flush()


def _log_commands(changed: Mapping[str, Change]) -> None:
    """Log changes by commands; the gateway that an admin key asked has logged that key's."""
    found: dict[tuple[str, str], list[str]] = {}
    for key_id, change in changed.items():
        # `user@host`; the ID of an access token's caller, which may have an @, begins with `name:`.
        if change.by is not None and "@" in change.by and ":" not in change.by:
            found.setdefault((change.by, "deleted" if change.deleted else "changed"), []).append(
                key_id
            )
    for (by, what), ids in found.items():
        more = f" and {len(ids) - MAX_LOGGED} more" if len(ids) > MAX_LOGGED else ""
        log.info("keys %s by command of %s: %s%s", what, by, ", ".join(ids[:MAX_LOGGED]), more)


def _updated_ids(ids: set[str] | None, changed: Mapping[str, Change]) -> set[str] | None:
    """Return the IDs of all keys after changes; None if they are unknown or too many."""
    if ids is None:
        return None
    for key_id, change in changed.items():
        if change.deleted:
            ids.discard(key_id)
        else:
            ids.add(key_id)
    return ids if len(ids) <= MAX_IDS else None


def _seconds(ms: int | None) -> float:
    return math.inf if ms is None else ms / 1000


def _not_for_admin() -> PermissionDenied:
    return PermissionDenied("this API key is for models only; /admin takes a key of another role")


def _store_unavailable() -> ServiceUnavailable:
    return ServiceUnavailable("API keys cannot be checked at the moment; try again")
