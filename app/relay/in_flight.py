"""Requests in flight by key, so that those of a key that is disabled can be ended."""

from typing import Protocol

from app.errors import InvalidApiKey

KEY_DISABLED = "this API key was disabled while its request was under way"


class Abortable(Protocol):
    """A request that can be ended from outside, at any time."""

    def cut(self, error: InvalidApiKey) -> None: ...


class RequestsInFlight:
    """The requests in flight of each key. A key without any has no entry."""

    def __init__(self) -> None:
        self._by_key: dict[str, set[Abortable]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def add(self, key_id: str, request: Abortable) -> None:
        """Add a request that begins."""
        requests = self._by_key.get(key_id)
        if requests is None:
            self._by_key[key_id] = {request}
        else:
            requests.add(request)

    def discard(self, key_id: str, request: Abortable) -> None:
        """Remove a request that has ended."""
        requests = self._by_key[key_id]
        requests.discard(request)
        if not requests:
            del self._by_key[key_id]

    def end_requests(self, key_id: str) -> None:
        """End every request of a key that was disabled."""
        for request in tuple(self._by_key.get(key_id, ())):
            request.cut(InvalidApiKey(KEY_DISABLED))
