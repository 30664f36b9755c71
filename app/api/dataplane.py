"""The data plane: an exact list of paths, each relayed to an engine. Everything else is not there.

vLLM's control and development routes (/sleep, /collective_rpc, /pause, /metrics…) are not on the
list, so no client reaches them through us, whatever an engine was started with.
"""

import re
from collections.abc import Awaitable

from starlette.types import ASGIApp, Receive, Scope, Send

from app.relay.relay import Relay
from app.relay.rooms import Endpoint

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
    """The data plane as the outermost layer: its chunks pass through none of the others."""

    def __init__(self, app: ASGIApp, relay: Relay) -> None:
        self._app = app
        self._relay = relay

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Relay what is on the list; `scope["path"]` never holds anything of the Host header."""
        if scope["type"] != "http" or (endpoint := endpoint_of(scope["path"])) is None:
            return self._app(scope, receive, send)
        return self._relay.serve(endpoint, scope, receive, send)
