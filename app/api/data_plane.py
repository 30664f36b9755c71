"""The data plane: an allow-list of paths, each relayed to an engine.

vLLM's control and development routes (/sleep, /collective_rpc, /pause, /metrics…) are not on the
list, so no client reaches them through the gateway, whatever an engine was started with.
"""

import re
from collections.abc import Callable
from functools import partial

from app.api.cors import CorsHeaders
from app.api.middleware import is_preflight
from app.asgi import ExchangeHandler, Headers
from app.relay import Relay
from app.request_body import Endpoint

# These count tokens or turn them into text and back; the model computes nothing.
UNMETERED = frozenset({"/v1/messages/count_tokens", "/tokenize", "/detokenize"})
ENDPOINTS = {
    path: Endpoint(path, metered=path not in UNMETERED)
    for path in (
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/rerank",
        "/v1/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/audio/speech",
        "/v1/images/generations",
        "/v1/images/edits",
        "/tokenize",
        "/detokenize",
        "/pooling",
        "/classify",
        "/rerank",
        "/score",
    )
}
TOKENIZER_INFO = Endpoint("/tokenizer_info", ("GET",), metered=False)
STORED_RESPONSE = Endpoint("/v1/responses/{id}", ("GET",), names_model=False, metered=False)
CANCEL_RESPONSE = Endpoint("/v1/responses/{id}/cancel", names_model=False, metered=False)
RESPONSE_ID = "[A-Za-z0-9_-]{1,128}"
# vLLM has no `compact`, which would be the ID of a response otherwise.
_RESPONSE = re.compile(f"/v1/responses/(?!compact$){RESPONSE_ID}(?P<cancel>/cancel)?")


def endpoint_of(path: str) -> Endpoint | None:
    """Return the endpoint of a path, exactly as it stands, or None."""
    if path == TOKENIZER_INFO.label:
        return TOKENIZER_INFO
    endpoint = ENDPOINTS.get(path)
    if endpoint is None and (match := _RESPONSE.fullmatch(path)):
        return CANCEL_RESPONSE if match["cancel"] else STORED_RESPONSE
    return endpoint


def find_none(path: str) -> ExchangeHandler | None:
    """Return None: the ASGI application serves every other path."""
    return None


class DataPlaneDispatcher:
    """Chooses the requests that the relay handles; see `app.asgi.Dispatcher`."""

    def __init__(
        self,
        relay: Relay,
        cors: CorsHeaders | None = None,
        find_other: Callable[[str], ExchangeHandler | None] = find_none,
    ) -> None:
        """`cors` adds headers for pages of other origins; None: no page may call.

        `find_other` returns the handler of a path that is not the data plane's.
        """
        self._relay = relay
        self._cors = cors
        self._find_other = find_other
        self._handlers: dict[str, ExchangeHandler] = {
            path: partial(relay.serve, endpoint) for path, endpoint in ENDPOINTS.items()
        }

    def find_handler(self, method: str, path: str, headers: Headers) -> ExchangeHandler | None:
        """See `Dispatcher`; the path never holds anything of the Host header."""
        handler = self._handlers.get(path)
        if handler is None:
            endpoint = endpoint_of(path)
            if endpoint is None:
                return self._find_other(path)
            handler = partial(self._relay.serve, endpoint)
        if self._cors is None:
            return handler
        if method == "OPTIONS" and is_preflight(headers):
            return None  # the middleware answers it
        return self._cors.wrap(handler)
