"""What is remembered of keys, by the full digest of what was presented; bounded."""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class DigestCache(Generic[T]):
    """Values by digest, each of one key; beyond `size`, the one used longest ago goes.

    A key may have several digests: a rotation leaves two that are good, a guess one that is not.
    A revision, of the whole store, says how new what is remembered is.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[bytes, tuple[str, int, T]] = OrderedDict()
        # The digests in `_values` by key id; never an empty set.
        self._digests: dict[str, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, digest: bytes) -> T | None:
        """Return the value of a digest, which counts as its use."""
        found = self._values.get(digest)
        if found is None:
            return None
        self._values.move_to_end(digest)
        return found[2]

    def put(self, digest: bytes, key_id: str, revision: int, value: T) -> None:
        """Remember a value, in which is every change up to a revision."""
        self.drop(digest)
        self._values[digest] = (key_id, revision, value)
        self._digests.setdefault(key_id, set()).add(digest)
        if len(self._values) > self._size:
            self.drop(next(iter(self._values)))

    def drop(self, digest: bytes) -> None:
        """Forget one digest."""
        found = self._values.pop(digest, None)
        if found is not None:
            digests = self._digests[found[0]]
            digests.discard(digest)
            if not digests:
                del self._digests[found[0]]

    def forget(self, key_id: str, change: int) -> None:
        """Forget the digests of a key whose values are from before a change, by its revision."""
        for digest in tuple(self._digests.get(key_id, ())):
            if self._values[digest][1] < change:
                self.drop(digest)

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
        self._digests.clear()
