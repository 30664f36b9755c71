"""Who may come in: how keys are presented, remembered and compared.

Only SHA-256 digests of keys are kept. Keys are random and long, so a fast hash is right (a slow
one guards guessable passwords); a look-up by whole digest tells nothing through its timing, since
what an attacker controls is the input of the hash, not the digest.

Stored keys are remembered. What makes a change known is a poll of the store's revision, one for
every gateway: PostgreSQL could notify, SQLite cannot (and the command line changes it from another
process), Redis may not be there, and a notification can be lost, which a poll would have to mend.
"""

import asyncio
import contextlib
import hmac
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.auth.digest_cache import DigestCache
from app.auth.key_format import id_of
from app.auth.key_store import ApiKey, Change, Credential, KeyStore
from app.auth.lookups import LaneFull, LookUps
from app.auth.principal import Allowed, Owner, Principal, Role
from app.database import DatabaseUnavailable
from app.errors import InvalidApiKey, PermissionDenied, ServiceUnavailable
from app.settings import NO_LIMITS, LimitSettings, digest

log = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]

_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
# Longer than any key that we accept from the configuration; not worth a hash.
MAX_KEY_LENGTH = 1024
# Keys that are remembered as good, and digests that are remembered as no key's.
CACHE_SIZE = 10_000
# How long a digest counts as no key's, should no change say so earlier.
UNKNOWN_TTL_S = 10.0
# Ids of keys that are kept in memory, some 100 bytes each; of more, none are.
MAX_IDS = 100_000
POLL_S = 0.5
FLUSH_S = 60.0


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the key of a request, from Authorization: Bearer or x-api-key.

    Raises InvalidApiKey when there is none, or more than one, or what cannot be one.
    """
    found: bytes | None = None
    for name, value in [pair for pair in headers if pair[0] in _CREDENTIALS]:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() != b"bearer":
                raise InvalidApiKey("the Authorization header must be `Bearer <key>`")
        else:
            key = value
        key = key.strip()
        if found is not None and not hmac.compare_digest(found, key):
            raise InvalidApiKey("the request has two different API keys")
        found = key
    if not found:
        raise InvalidApiKey(
            "no API key: send `Authorization: Bearer <key>` or `x-api-key: <key>`", "missing"
        )
    if len(found) > MAX_KEY_LENGTH or len(found.split(None, 1)) != 1:
        raise _not_valid()
    return found


@dataclass(frozen=True, slots=True)
class Entry:
    """What is remembered of a secret that belongs to a stored key."""

    principal: Principal
    disabled: bool
    until: float  # in seconds since 1970; when the key expires or the grace of a rotation ends


def cut_nothing(key_id: str) -> None:
    """End no request."""


class Authenticator:
    """Decides who comes in.

    Static keys are those of the configuration. `on_cut` ends the requests in flight of a key, by
    its id; it is called once for each time that somebody asked for that, after the key has ceased
    to let anybody in. `now` is the wall clock, which expiry goes by; `monotonic` times everything
    else.
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
        on_cut: Callable[[str], None] = cut_nothing,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        # Without keys there is nobody to limit; models still have limits of their own.
        self._anonymous = Principal("anonymous", Role.CLIENT, NO_LIMITS)
        self._root = Principal("root", Role.ADMIN, NO_LIMITS)
        self._enabled = enabled
        self._limits = limits
        self._grace_s = offline_grace_s
        self._on_cut = on_cut
        self._now = now
        self._monotonic = monotonic

        self._known: DigestCache[Entry] = DigestCache(CACHE_SIZE)
        # Digests that are no key's, and until when on the monotonic clock.
        self._unknown: DigestCache[float] = DigestCache(CACHE_SIZE)
        # Every change up to this revision is accounted for in both; None: not heard yet.
        self._revision: int | None = None
        self._outdated = False  # what is remembered of stored keys has limits of before
        # When the requests of keys were last ended, by id, until the key is enabled or deleted.
        self._cuts: dict[str, int] = {}
        self._polling = asyncio.Lock()  # an older answer must not follow a newer one
        self._offline = False
        self._heard = monotonic()  # when the last poll that succeeded began
        self._look_ups = LookUps(self._read, self._settle)
        # The ids of all keys that were not deleted; None: not loaded, or too many.
        self._ids: set[str] | None = None
        # When keys were used that the store has not been told of yet.
        self._used: dict[str, float] = {}
        self.replace(static, admin, limits)

    def replace(
        self, static: Collection[bytes], admin: bytes | None, limits: LimitSettings
    ) -> None:
        """Go by other keys of the configuration and other limits.

        At once, but that the limits of stored keys that are remembered follow with the next poll:
        while the store is away they cannot be read again.
        """
        if limits != self._limits:
            self._limits = limits
            self._outdated = True
        self._static = {
            one: Principal(f"key-{one.hex()[:8]}", Role.CLIENT, limits) for one in static
        }
        self._admin = admin

    @property
    def default_limits(self) -> LimitSettings:
        """The limits of a key that has none of its own."""
        return self._limits

    def recall(self, headers: Headers) -> Principal | None:
        """Return who sent these headers, or None where only `look_up` can tell.

        Raises InvalidApiKey, and ServiceUnavailable once the store has been away for too long.
        """
        if not self._enabled:
            return self._anonymous
        key = presented_key(headers)
        kept = digest(key)
        principal = self._static.get(kept)
        if principal is not None:
            return principal
        entry = self._remembered(key, kept)
        return None if entry is None else self._let_in(entry, admin=False)

    async def look_up(self, headers: Headers) -> Principal:
        """Return who sent these headers, from the store.

        Raises InvalidApiKey, and ServiceUnavailable where the store does not answer.
        """
        key = presented_key(headers)
        return self._let_in(await self._fetched(key, digest(key)), admin=False)

    async def authenticate(self, headers: Headers) -> Principal:
        """Return who sent these headers. Raises InvalidApiKey and ServiceUnavailable."""
        return self.recall(headers) or await self.look_up(headers)

    async def admin(self, headers: Headers) -> Principal:
        """Return who sent these headers to /admin, which asks for a key in any case.

        Raises InvalidApiKey, ServiceUnavailable, and PermissionDenied for a client's key.
        """
        key = presented_key(headers)
        kept = digest(key)
        if self._admin is not None and hmac.compare_digest(kept, self._admin):
            return self._root
        if kept in self._static:
            raise _not_for_admin()
        entry = self._remembered(key, kept) or await self._fetched(key, kept)
        return self._let_in(entry, admin=True)

    def _let_in(self, entry: Entry, *, admin: bool) -> Principal:
        """Return whose secret it is, if it is good now. The only place where use is noted."""
        if self._offline and self._monotonic() - self._heard > self._grace_s:
            raise _no_answer()
        if entry.disabled:
            raise InvalidApiKey("the API key is disabled")
        now = self._now()
        if now >= entry.until:
            raise InvalidApiKey("the API key has expired")
        principal = entry.principal
        if (principal.role is not Role.CLIENT) is not admin:
            if admin:
                raise _not_for_admin()
            raise InvalidApiKey("this key is for administration only")
        self._used[principal.id] = now
        return principal

    def _remembered(self, key: bytes, kept: bytes) -> Entry | None:
        """Return what is known of a secret; None: nothing. Raises InvalidApiKey."""
        entry = self._known.get(kept)
        if entry is not None:
            return entry
        until = self._unknown.get(kept)
        if id_of(key) is None or (until is not None and self._monotonic() < until):
            raise _not_valid()
        return None

    # Look-ups

    async def _fetched(self, key: bytes, kept: bytes) -> Entry:
        """Return what the store knows of a secret."""
        key_id = id_of(key)
        if key_id is None:
            raise _not_valid()
        while not self._offline:
            exists = self._ids is None or key_id in self._ids
            try:
                await self._look_ups.settled(key_id, kept, exists=exists)
            except (DatabaseUnavailable, LaneFull):
                raise _no_answer() from None
            if (entry := self._known.get(kept)) is not None:
                return entry
            if self._unknown.get(kept) is not None:
                raise _not_valid()
            # Neither: a poll heard of a change before it was this caller's turn to go on.
        raise _no_answer()

    async def _read(self, key_id: str) -> tuple[int, Credential | None]:
        if self._offline:  # since it began to wait for its turn
            raise DatabaseUnavailable("the key store is away")
        try:
            return await self._store.find(key_id)
        except DatabaseUnavailable as error:
            self._lost(error)
            raise

    def _settle(
        self, key_id: str, kept: bytes, found: tuple[int, Credential | None], final: bool
    ) -> bool:
        """Remember what a read proves, and what it disproves if it is final."""
        revision, credential = found
        entry = self._proved(credential, kept)
        if entry is not None:
            self._known.put(kept, key_id, revision, entry)
        elif final:
            self._unknown.put(kept, key_id, revision, self._monotonic() + UNKNOWN_TTL_S)
        return final or entry is not None

    def _proved(self, found: Credential | None, kept: bytes) -> Entry | None:
        """Return what a digest proves; None: nothing."""
        if found is None:
            return None
        until = _seconds(found.key.expires_ms)
        if not hmac.compare_digest(found.digest, kept):
            previous = found.previous_digest
            if previous is None or not hmac.compare_digest(previous, kept):
                return None
            until = min(until, _seconds(found.key.previous_until_ms))
        return Entry(self._principal(found.key, found.owner), found.key.disabled, until)

    def _principal(self, key: ApiKey, owner: Owner | None) -> Principal:
        return Principal(
            key.id,
            key.role,
            key.limits(self._limits),
            Allowed.of(key.models),
            key.priority,
            key.weight,
            key.daily_tokens,
            key.monthly_tokens,
            key.fields,
            key.owner,
            owner,
        )

    # What goes on behind requests

    async def run(self) -> None:
        """Keep up with the store until cancelled."""
        flush_at = self._monotonic() + FLUSH_S
        while True:
            try:
                await self.poll()
                if self._monotonic() >= flush_at:
                    flush_at = self._monotonic() + FLUSH_S
                    await self.flush()
            except Exception as error:  # noqa: BLE001 - keys must not go stale without a word
                self._lost(error)
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Forget the keys that were changed since the last time; notice whether the store is up."""
        async with self._polling:
            began = self._monotonic()
            try:
                revision, changed = await self._store.changed_since(self._revision)
                # Backwards: the database is not the one it was, a backup perhaps.
                anew = self._revision is None or revision < self._revision
                ids = await self._store.ids(MAX_IDS) if anew else self._ids
            except DatabaseUnavailable as error:
                self._lost(error)
                return
            if anew:
                self._cuts.clear()
            if anew or self._outdated:
                self._known.clear()
                self._unknown.clear()
                self._look_ups.outdate_all()
                self._outdated = False
            for key_id, change in changed.items():
                # What was read since stays: the store may go away before it is read again.
                self._known.forget(key_id, change.revision)
                self._unknown.forget(key_id, change.revision)
            self._look_ups.outdate(changed)
            self._ids = _with_changes(ids, changed)
            self._revision = revision
            self._heard = began
            if self._offline:
                self._offline = False
                log.info("the key store answers again")
            for key_id in self._newly_cut(changed):
                self._on_cut(key_id)

    def _newly_cut(self, changed: Mapping[str, Change]) -> list[str]:
        """Return the keys whose requests are to end, each once for a cut; remember the cuts."""
        found = []
        for key_id, change in changed.items():
            if change.cut_ms is not None and change.cut_ms != self._cuts.get(key_id):
                found.append(key_id)
            if change.cut_ms is None or change.deleted:  # a deleted key changes no more
                self._cuts.pop(key_id, None)
            else:
                self._cuts[key_id] = change.cut_ms
        return found

    def _lost(self, error: Exception) -> None:
        if not self._offline:
            self._offline = True
            trace = None if isinstance(error, DatabaseUnavailable) else error
            told = ("key store: %s; known keys work for %g s", error, self._grace_s)
            log.error(*told, exc_info=trace)

    async def flush(self) -> None:
        """Tell the store when keys were last used; what it does not take is kept."""
        used = dict(self._used)
        with contextlib.suppress(DatabaseUnavailable):
            await self._store.touch({key_id: int(at * 1000) for key_id, at in used.items()})
            for key_id, at in used.items():
                if self._used[key_id] == at:
                    del self._used[key_id]

    async def close(self) -> None:
        """End the look-ups under way and flush; `run` has ended before."""
        await self._look_ups.close()
        await self.flush()


def _with_changes(ids: set[str] | None, changed: Mapping[str, Change]) -> set[str] | None:
    """Return the ids of all keys after changes; None where they are unknown or too many."""
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


def _not_valid() -> InvalidApiKey:
    return InvalidApiKey("the API key is not valid")


def _not_for_admin() -> PermissionDenied:
    return PermissionDenied("this API key is for models only; /admin takes a key of another role")


def _no_answer() -> ServiceUnavailable:
    return ServiceUnavailable("API keys cannot be checked at the moment; try again")
