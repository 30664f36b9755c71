"""The playground: requests to models by the session's key, on the way of everybody's."""

from collections.abc import Coroutine
from typing import Any

from app.api import endpoint_of
from app.asgi import ClientExchange, ExchangeHandler
from app.console.guard import API
from app.relay import Relay
from app.request_body import Endpoint


class PlaygroundHandlers:
    """Finds the handlers of the data plane below /console/api, by session instead of key."""

    def __init__(self, relay: Relay) -> None:
        """`relay` authenticates by session."""
        self._relay = relay

    def find_handler(self, path: str) -> ExchangeHandler | None:
        """Return the handler of a path; None: it is not the data plane's."""
        if not path.startswith(f"{API}/"):
            return None
        endpoint = endpoint_of(path.removeprefix(API))
        if endpoint is None:
            return None

        def serve(exchange: ClientExchange) -> Coroutine[Any, Any, None]:
            return self._serve(endpoint, exchange)

        return serve

    async def _serve(self, endpoint: Endpoint, exchange: ClientExchange) -> None:
        exchange.path = exchange.path.removeprefix(API)
        await self._relay.serve(endpoint, exchange)
