"""A bounded LRU cache by the full digest of a presented key."""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class DigestCache(Generic[T]):
    """Caches values by digest, each of one key; evicts the least recently used beyond `size`.

    A key may have several digests: two valid ones after a rotation, and those of guesses. Each
    value has the store's revision at which it was read.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[bytes, tuple[str, int, T]] = OrderedDict()
        # The digests in `_values` by key id; never an empty set.
        self._digests: dict[str, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, digest: bytes) -> T | None:
        """Return the value of a digest and mark it as used."""
        found = self._values.get(digest)
        if found is None:
            return None
        self._values.move_to_end(digest)
        return found[2]

    def put(self, digest: bytes, key_id: str, revision: int, value: T) -> None:
        """Store a value that includes every change up to a revision."""
        self.drop(digest)
        self._values[digest] = (key_id, revision, value)
        self._digests.setdefault(key_id, set()).add(digest)
        if len(self._values) > self._size:
            self.drop(next(iter(self._values)))

    def drop(self, digest: bytes) -> None:
        """Remove one digest."""
        found = self._values.pop(digest, None)
        if found is not None:
            digests = self._digests[found[0]]
            digests.discard(digest)
            if not digests:
                del self._digests[found[0]]

    def invalidate(self, key_id: str, revision: int) -> None:
        """Remove the values of a key that are older than a revision."""
        for digest in tuple(self._digests.get(key_id, ())):
            if self._values[digest][1] < revision:
                self.drop(digest)

    def drop_older(self, revision: float) -> None:
        """Remove the values of all keys that are older than a revision; infinity: all values."""
        for digest, found in tuple(self._values.items()):
            if found[1] < revision:
                self.drop(digest)
