"""The response side of one request: its head and chunks on their way to the client."""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from app.errors import Dialect, GatewayError
from app.relay.exchange import Headers

# The lines that stand before chunks of the usual sizes; to format one takes longer than to join it.
_SIZES = tuple(b"%x\r\n" % size for size in range(4096))


class ResponseTransport:
    """A transport for one answer: its head leaves with the first of its body, in one write."""

    __slots__ = ("_close", "_cycle", "_flow", "_flush", "_head", "_loop", "_transport")

    def __init__(
        self,
        cycle: RequestResponseCycle,
        loop: asyncio.AbstractEventLoop,
        close: Callable[[RequestResponseCycle], None],
    ) -> None:
        """`close` is called instead of closing the connection under this answer."""
        self._cycle = cycle
        self._transport = cycle.transport
        self._flow = cycle.flow
        self._loop = loop
        self._close = close
        self._head: bytes | None = None
        self._flush: asyncio.Handle | None = None  # there from the head on

    def write_chunk(self, data: bytes) -> bool:
        """See `app.relay.exchange.WRITE`."""
        if self._cycle.disconnected:
            return True  # silent as uvicorn's `send`; `receive` tells
        size = len(data)
        line = _SIZES[size] if size < len(_SIZES) else b"%x\r\n" % size
        chunk = b"".join((line, data, b"\r\n"))
        if self._head is None:
            self._transport.write(chunk)
        else:
            self.write(chunk)
        return not self._flow.write_paused

    def write_whole(self, status: int, headers: Headers, body: bytes) -> bool:
        """See `app.relay.exchange.ANSWER`. What uvicorn's `send` does, without its checks."""
        cycle = self._cycle
        if (
            cycle.response_started
            or cycle.disconnected
            or not cycle.keep_alive
            or self._flow.write_paused
            or cycle.scope["method"] == "HEAD"
        ):
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        pieces = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            pieces += (name, b": ", value, b"\r\n")
        pieces += (b"\r\n", body)
        self._transport.write(b"".join(pieces))
        cycle.message_event.set()
        cycle.on_response()
        return True

    def write(self, data: bytes) -> None:
        if self._head is not None:
            assert self._flush is not None
            self._flush.cancel()
            head, self._head = self._head, None
            self._transport.write(head + data)
        elif self._flush is None and self._cycle.response_started:
            self._head = data
            self._flush = self._loop.call_soon(self.flush)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send the head alone: nothing of the body came with it."""
        if self._head is not None:
            head, self._head = self._head, None
            if not self._transport.is_closing():  # uvloop's raises once it has closed
                self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._close(self._cycle)

    def is_closing(self) -> bool:
        return self._transport.is_closing()


def take_body(cycle: RequestResponseCycle) -> bytes | None:
    """See `app.relay.exchange.BODY`. What uvicorn's `receive` does, without its wait."""
    if (
        cycle.more_body
        or cycle.waiting_for_100_continue
        or cycle.disconnected
        or cycle.response_complete
        or not cycle.message_event.is_set()  # the body has been taken
    ):
        return None
    cycle.flow.resume_reading()
    cycle.message_event.clear()
    body = bytes(cycle.body)
    cycle.body = bytearray()
    return body


async def without_chunks(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run the application for an HTTP/1.0 client: a body without a length ends the connection.

    uvicorn would send chunks, which HTTP/1.0 does not know (RFC 9112, section 6.1).
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
    """Return the bytes of a whole response that refuses a request and ends the connection."""
    body = error.body(Dialect.OPENAI)
    headers = b"".join(b"%b: %b\r\n" % header for header in error.headers())
    return (
        b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b"
        b"connection: close\r\n\r\n%b" % (error.status, len(body), headers, body)
    )
