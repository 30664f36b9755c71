"""The data plane: an exact list of paths, each relayed to an engine. Everything else is not there.

vLLM's control and development routes (/sleep, /collective_rpc, /pause, /metrics…) are not on the
list, so no client reaches them through us, whatever an engine was started with.
"""

import re

from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from app.errors import MethodNotAllowed
from app.relay.relay import Endpoint, Relay

ENDPOINTS = {
    path: Endpoint(path)
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
STORED_RESPONSE = Endpoint("/v1/responses/{id}", ("GET",), names_model=False)
CANCEL_RESPONSE = Endpoint("/v1/responses/{id}/cancel", names_model=False)
_RESPONSE = re.compile(r"/v1/responses/[A-Za-z0-9_-]{1,128}(?P<cancel>/cancel)?")


def endpoint_of(path: str) -> Endpoint | None:
    """Return the endpoint of a path, exactly as it stands, or None."""
    endpoint = ENDPOINTS.get(path)
    if endpoint is None and (match := _RESPONSE.fullmatch(path)):
        return CANCEL_RESPONSE if match["cancel"] else STORED_RESPONSE
    return endpoint


class DataPlane(BaseRoute):
    """All data-plane paths as one route: one dictionary look-up instead of a regex per path."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match on the path alone; `scope["path"]` never holds anything of the Host header."""
        if scope["type"] != "http" or (endpoint := endpoint_of(scope["path"])) is None:
            return Match.NONE, {}
        return Match.FULL, {"endpoint": endpoint}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint: Endpoint = scope["endpoint"]
        if scope["method"] not in endpoint.methods:
            allowed = ", ".join(endpoint.methods)
            raise MethodNotAllowed(f"{scope['path']} takes {allowed}", allowed)
        await self._relay.serve(endpoint, scope, receive, send)
