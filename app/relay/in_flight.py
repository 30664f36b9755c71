"""Requests under way by key, so that those of a key that was cut off can be ended."""

from typing import Protocol

from app.errors import InvalidApiKey

CUT_OFF = "this API key was disabled while its request was under way"


class Cuttable(Protocol):
    """Something that can be ended from outside; safe to call at any time."""

    def cut(self, error: InvalidApiKey) -> None: ...


class RequestsInFlight:
    """Who is under way. What is not has no entry."""

    def __init__(self) -> None:
        self._by_key: dict[str, set[Cuttable]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def add(self, key_id: str, request: Cuttable) -> None:
        """Note a request that begins."""
        requests = self._by_key.get(key_id)
        if requests is None:
            self._by_key[key_id] = {request}
        else:
            requests.add(request)

    def discard(self, key_id: str, request: Cuttable) -> None:
        """Forget a request that has ended."""
        requests = self._by_key[key_id]
        requests.discard(request)
        if not requests:
            del self._by_key[key_id]

    def cut(self, key_id: str) -> None:
        """End every request of a key."""
        for request in tuple(self._by_key.get(key_id, ())):
            request.cut(InvalidApiKey(CUT_OFF))
