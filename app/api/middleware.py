"""What is true of every request: it has an id, and its body has a bound. Pure ASGI."""

import re
import uuid
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import RequestTooLarge

_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class RequestId:
    """Keeps the client's x-request-id where it is harmless, makes one otherwise, returns it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v for n, v in scope["headers"] if n == b"x-request-id"), b"")
        request_id = given if _CLIENT_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        # Not a coroutine: a chunk of a stream passes without one more frame to step through.
        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"x-request-id", request_id)]
                message = {**message, "headers": headers}
            return send(message)

        await self._app(scope, receive, send_with_id)


class BodyLimit:
    """Ends the reading of a body that is too large with RequestTooLarge, out of `receive`.

    The server goes on reading what still comes and throws it away: closing at once would reset the
    connection, and the client would see that instead of the answer.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((v for n, v in scope["headers"] if n == b"content-length"), b"0")
        # A length that is not a number was refused by the server's parser already.
        too_large = int(declared) > self._max_bytes
        received = 0

        async def receive_within_limit() -> Message:
            nonlocal received
            if too_large:
                raise self._error()
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._error()
            return message

        await self._app(scope, receive_within_limit, send)

    def _error(self) -> RequestTooLarge:
        return RequestTooLarge(f"the request body is over the limit of {self._max_bytes} bytes")
