"""ASGI middleware for vLLM that asks for the engine's key on every path. Standard library only.

vLLM (0.32) asks for VLLM_API_KEY below /v1 and a few more prefixes. An engine on a network has it
on its other routes too, such as /metrics, /tokenize, /score and those of VLLM_SERVER_DEV_MODE=1:

    vllm serve --middleware=engines.inside.vllm_gateway_key.RequireKey
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

KEY = "VLLM_API_KEY"
FLAG = f"--middleware={__name__}.RequireKey"

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Callable[[], Awaitable[Message]], Send], Awaitable[None]]


class RequireKey:
    """Passes on requests and WebSocket handshakes that have the key of VLLM_API_KEY."""

    def __init__(self, app: App) -> None:
        """Raises KeyError without a key: a server that anyone could use does not start."""
        self._app = app
        key = os.environ[KEY]
        if not key:
            raise KeyError(KEY)
        self._expected = f"Bearer {key}".encode()

    def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send
    ) -> Awaitable[None]:
        if scope["type"] == "lifespan" or self._has_key(scope):
            return self._app(scope, receive, send)
        return _refuse(scope, send)

    def _has_key(self, scope: Message) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                return hmac.compare_digest(value, self._expected)
        return False


async def _refuse(scope: Message, send: Send) -> None:
    if scope["type"] == "websocket":  # the server answers the handshake with 403
        await send({"type": "websocket.close", "code": 1008})
        return
    body = b'{"error":"Unauthorized"}'
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
