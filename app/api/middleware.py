"""What is true of every request beside the data plane's, which does the same itself. Pure ASGI."""

from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.telemetry.access import request_id


class RequestId:
    """Keeps the client's x-request-id where it is harmless, makes one otherwise, returns it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = (b"x-request-id", request_id(scope["headers"]).encode())

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            return send(message)

        await self._app(scope, receive, send_with_id)


class HeadAsGet:
    """Lets HEAD ask what GET answers; the server leaves the body out (RFC 9110, section 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
