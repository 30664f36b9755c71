"""Names of keys by their IDs, for pages that show requests of many keys."""

import time
from collections.abc import Callable, Collection, Mapping

from app.api import key_in_scope
from app.auth import AdminScope, KeyStore
from app.database import DatabaseError

# A renamed key is shown under its old name for as long as this.
LIFETIME_S = 30.0
MAX_NAMES = 10_000


class KeyNames:
    """Caches the names of keys, so that pages that refresh do not ask the database each time."""

    def __init__(self, store: KeyStore, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._names: dict[str, str] = {}
        self._until = 0.0

    async def id_of(self, named: str, scope: AdminScope) -> str:
        """Return the ID of a key by its name or ID. Raises UnknownKey and DatabaseError."""
        return await key_in_scope(self._store, named, scope)

    async def find(self, key_ids: Collection[str]) -> Mapping[str, str]:
        """Return a name for each ID: the ID itself where the key has none, or is not known."""
        if self._monotonic() >= self._until or len(self._names) > MAX_NAMES:
            self._names = {}
            self._until = self._monotonic() + LIFETIME_S
        found = {key_id: self._names[key_id] for key_id in key_ids if key_id in self._names}
        missing = set(key_ids) - found.keys()
        if missing:
            try:
                stored = await self._store.names(missing)
            except DatabaseError:
                return {**found, **{key_id: key_id for key_id in missing}}
            read = {key_id: stored.get(key_id, key_id) for key_id in missing}
            self._names.update(read)
            found.update(read)
        return found
