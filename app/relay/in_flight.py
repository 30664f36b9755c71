"""Requests in flight by key, so that they can be listed, and ended from outside."""

from collections.abc import Iterator

from app.errors import InvalidApiKey
from app.relay.request_context import RequestContext

KEY_DISABLED = "this API key was disabled while its request was under way"


class RequestsInFlight:
    """The requests in flight of each key. A key without any has no entry."""

    def __init__(self) -> None:
        self._by_key: dict[str, set[RequestContext]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def __iter__(self) -> Iterator[RequestContext]:
        """Yield the requests, of one key after another."""
        for requests in self._by_key.values():
            yield from requests

    def of_key(self, key_id: str) -> tuple[RequestContext, ...]:
        """Return the requests of a key."""
        return tuple(self._by_key.get(key_id, ()))

    def add(self, key_id: str, request: RequestContext) -> None:
        """Add a request that begins."""
        requests = self._by_key.get(key_id)
        if requests is None:
            self._by_key[key_id] = {request}
        else:
            requests.add(request)

    def discard(self, key_id: str, request: RequestContext) -> None:
        """Remove a request that has ended."""
        requests = self._by_key[key_id]
        requests.discard(request)
        if not requests:
            del self._by_key[key_id]

    def end_requests(self, key_id: str) -> None:
        """End every request of a key that was disabled."""
        for request in self.of_key(key_id):
            request.exchange.cut(InvalidApiKey(KEY_DISABLED))
