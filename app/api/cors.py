"""CORS headers for responses of the data plane (Fetch standard, section 3.2)."""

from collections.abc import Coroutine
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from app.asgi import ClientExchange, ExchangeHandler, Headers

# So that caches keep a response for each origin (Fetch standard, section 3.2.5).
_VARY = (b"vary", b"Origin")


class CorsHeaders:
    """Adds the headers that Starlette's middleware adds to responses of the ASGI application."""

    def __init__(self, middleware: CORSMiddleware) -> None:
        self._middleware = middleware
        self._common = _encoded(middleware.simple_headers)

    def wrap(self, handler: ExchangeHandler) -> ExchangeHandler:
        """Return a handler whose responses have these headers."""

        def with_headers(exchange: ClientExchange) -> Coroutine[Any, Any, None]:
            exchange.extra_headers = self._for_origin(exchange.header(b"origin"))
            return handler(exchange)

        return with_headers

    def _for_origin(self, origin: bytes) -> Headers:
        if not origin:
            return [_VARY]
        middleware = self._middleware
        if middleware.allow_all_origins or not middleware.is_allowed_origin(
            origin.decode("latin-1")
        ):
            return [*self._common, _VARY]
        return [*self._common, (b"access-control-allow-origin", origin), _VARY]


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(n.lower().encode(), v.encode()) for n, v in headers.items()]
