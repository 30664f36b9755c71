"""Adapts responses of the ASGI application to the connection, and encodes refusals."""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from app.errors import Dialect, GatewayError


class AsgiTransport:
    """Transport of one response; the connection decides how it is closed."""

    __slots__ = ("_close", "_cycle", "_transport", "write")

    def __init__(
        self, cycle: RequestResponseCycle, close: Callable[[RequestResponseCycle], None]
    ) -> None:
        """`close` is called when the response closes its transport."""
        self._cycle = cycle
        self._transport = cycle.transport
        self._close = close
        self.write = cycle.transport.write

    def close(self) -> None:
        self._close(self._cycle)

    def is_closing(self) -> bool:
        return self._transport.is_closing()


async def without_chunks(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run the application for an HTTP/1.0 client: a body without a length ends with the connection.

    uvicorn would send chunks, which HTTP/1.0 does not have (RFC 9112, section 6.1).
    """
    unframed = False

    async def send_unframed(message: Message) -> None:
        nonlocal unframed
        if message["type"] == "http.response.start":
            unframed = all(name != b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = True if unframed else None  # True: no header is added
            await send(message)
            cycle.chunked_encoding = False
        else:
            if unframed:
                cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

    await app(scope, receive, send_unframed)


def error_response(error: GatewayError) -> bytes:
    """Return the response that refuses a request and closes the connection, encoded."""
    body = error.body(Dialect.OPENAI)
    headers = b"".join(b"%b: %b\r\n" % header for header in error.headers())
    return (
        b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b"
        b"connection: close\r\n\r\n%b" % (error.status, len(body), headers, body)
    )
