"""The data plane: an exact list of paths, each relayed to an engine. Everything else is not there.

vLLM's control and development routes (/sleep, /collective_rpc, /pause, /metrics…) are not on the
list, so no client reaches them through us, whatever an engine was started with.
"""

import re
from functools import partial

from app.api.cors import CorsHeaders
from app.api.middleware import is_preflight
from app.relay.relay import Relay
from app.relay.services import Endpoint
from app.server.connection import Headers, Serve

# These count tokens or turn them into text and back; the model computes nothing.
UNMETERED = frozenset({"/v1/messages/count_tokens", "/tokenize", "/detokenize"})
ENDPOINTS = {
    path: Endpoint(path, metered=path not in UNMETERED)
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/rerank",
        "/v1/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/tokenize",
        "/detokenize",
        "/pooling",
        "/classify",
        "/rerank",
        "/score",
    )
}
STORED_RESPONSE = Endpoint("/v1/responses/{id}", ("GET",), names_model=False, metered=False)
CANCEL_RESPONSE = Endpoint("/v1/responses/{id}/cancel", names_model=False, metered=False)
RESPONSE_ID = "[A-Za-z0-9_-]{1,128}"
_RESPONSE = re.compile(f"/v1/responses/{RESPONSE_ID}(?P<cancel>/cancel)?")


def endpoint_of(path: str) -> Endpoint | None:
    """Return the endpoint of a path, exactly as it stands, or None."""
    endpoint = ENDPOINTS.get(path)
    if endpoint is None and (match := _RESPONSE.fullmatch(path)):
        return CANCEL_RESPONSE if match["cancel"] else STORED_RESPONSE
    return endpoint


class DataPlane:
    """See `app.server.connection.DataPlane`. What is not on the list goes to the ASGI
    application."""

    def __init__(self, relay: Relay, cors: CorsHeaders | None = None) -> None:
        """`cors` has what pages of other origins are told; None: nothing."""
        self._relay = relay
        self._cors = cors
        self._serve: dict[str, Serve] = {
            path: partial(relay.serve, endpoint) for path, endpoint in ENDPOINTS.items()
        }

    def server_of(self, method: str, path: str, headers: Headers) -> Serve | None:
        """Return what serves a request; the path never holds anything of the Host header."""
        serve = self._serve.get(path)
        if serve is None:
            endpoint = endpoint_of(path)
            if endpoint is None:
                return None
            serve = partial(self._relay.serve, endpoint)
        if self._cors is None:
            return serve
        if method == "OPTIONS" and is_preflight(headers):
            return None  # the middleware answers it
        return self._cors.around(serve)
