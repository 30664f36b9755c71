"""Names of keys by their IDs, for pages that show requests of many keys."""

import time
from collections.abc import Callable, Collection, Mapping

from app.auth import KeyStore
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

    async def find(self, key_ids: Collection[str]) -> Mapping[str, str]:
        """Return a name for each ID: the ID itself where the key has none, or is not known."""
        if self._monotonic() >= self._until or len(self._names) > MAX_NAMES:
            self._names = {}
            self._until = self._monotonic() + LIFETIME_S
        missing = set(key_ids) - self._names.keys()
        if missing:
            try:
                found = await self._store.names(missing)
            except DatabaseError:
                return {**{key_id: key_id for key_id in missing}, **self._names}
            self._names |= {key_id: found.get(key_id, key_id) for key_id in missing}
        return self._names
