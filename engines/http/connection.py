"""One HTTP/1.1 connection to an engine, parsed by httptools."""

import asyncio
import ssl
from typing import Protocol, cast

import httptools

from engines.base import (
    EngineDied,
    EngineError,
    EngineProtocolError,
    FirstByteTimeout,
    StallTimeout,
)
from engines.http.address import Address
from engines.http.response import ResponseBody
from engines.spec import Timeouts
from engines.timing import MovingDeadline

# nginx allows 4 or 8 KiB of response headers by default, Go's client 10 MiB; vLLM sends below 1.
MAX_HEAD_BYTES = 64 * 1024
# Up to this size a body is copied behind its head: that takes less than a second buffer.
MAX_COPIED_BYTES = 16 * 1024


class ClosedBeforeResponse(EngineDied):
    """The connection closed before the first byte of the response: a stale one may be replaced."""

    reason = "ClosedBeforeAnswer"


class Pool(Protocol):
    """The owner of connections: `engines.http.client.Http1Client`."""

    address: Address
    timeouts: Timeouts
    least_timeout_s: float  # the less of those between two bytes, and before the first

    def release(self, connection: "Http1Connection") -> None:
        """Take back a connection after a complete response."""

    def discard(self, connection: "Http1Connection") -> None:
        """Drop a connection that closes, or has closed; safe to call at any time."""


class Http1Connection(asyncio.Protocol, MovingDeadline):
    """One connection and the parser of its responses. At most one exchange at a time."""

    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        # Below TLS, whose transport does not count the bytes buffered here.
        self._tcp: asyncio.Transport | None = None
        # Body chunks of the current read of the socket; the parser appends to it directly.
        self._body: list[bytes] = []
        self.on_body = self._body.append
        self._parser = httptools.HttpResponseParser(self)
        self._response: ResponseBody | None = None
        # Set while the response headers are awaited; each exchange sets its own.
        self._awaiting: asyncio.Future[ResponseBody] | None = None
        # Of the response that is awaited; None after them: later fields are trailers.
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._trailer_bytes = 0
        # Received since the last body chunk, and in the present read of the socket.
        self._framing_bytes = 0
        self._message_complete = False
        # The parser has read a whole chunk, and nothing behind it.
        self._between_chunks = False
        self._keep_alive = False
        self._until_close = False
        self._paused = False
        # The timer outlives an exchange: requests need none of their own.
        self._sent_at = 0.0
        self._last_byte = 0.0  # 0.0: none yet of the current response
        self.idle_since = 0.0

    # The exchange

    def begin(
        self, payload: bytes, body: bytes
    ) -> tuple[ResponseBody, asyncio.Future[ResponseBody]]:
        """Send one request; return its response, and what is done when its headers are here.

        Raises ClosedBeforeResponse; the future raises EngineError.
        """
        transport, pool, loop = self._transport, self._pool, self._loop
        if transport is None or transport.is_closing():
            raise ClosedBeforeResponse(f"{pool.address} closed the connection")
        response = ResponseBody(self, loop)
        self._response = response
        headers_received: asyncio.Future[ResponseBody] = loop.create_future()
        self._awaiting = headers_received
        self._headers = response.headers
        self._framing_bytes = self._trailer_bytes = 0
        self._message_complete = self._between_chunks = False
        self._last_byte = 0.0
        self._sent_at = now = loop.time()
        # The earlier timeout; when it fires, the rest of the other one is waited for.
        if self._timer is None or now + pool.least_timeout_s < self._timer_due:
            self._set_timer(now + pool.least_timeout_s)
        if len(body) > MAX_COPIED_BYTES:
            transport.writelines((payload, body))
        else:
            transport.write(payload + body)
        return response, headers_received

    def abort(self) -> None:
        """Close the connection at once; safe to call at any time."""
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection at once; a response in flight fails with EngineDied."""
        self._fail(EngineDied(f"the connection to {self._pool.address} was closed"))

    def resume(self) -> None:
        """Read the socket again: the response's buffer is empty."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._last_byte = self._loop.time()
            self._transport.resume_reading()

    def waiting_s(self, now: float) -> float:
        """Return how long an exchange has waited for a byte; 0.0 when none waits."""
        if self._response is None or self._paused:
            return 0.0
        return now - max(self._sent_at, self._last_byte)

    async def start_tls(self, context: ssl.SSLContext, host: str) -> None:
        """Encrypt the connection. Raises OSError."""
        tcp = self._transport
        assert tcp is not None
        try:
            secured = await self._loop.start_tls(tcp, self, context, server_hostname=host)
        except BaseException:
            tcp.abort()
            raise
        self._transport, self._tcp = secured, tcp

    # asyncio.Protocol callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            # Unsolicited bytes: the next request could take them for its response.
            self.abort()
            return
        self._last_byte = self._loop.time()
        if self._between_chunks and (sink := response.chunk_sink) is not None and sink(data):
            return  # the parser would be where it was
        self._framing_bytes += len(data)
        broken: EngineProtocolError | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # The error of one of our callbacks is the context of the parser's.
            reason = error.__context__ or error
            broken = EngineProtocolError(f"{self._pool.address} broke HTTP/1.1: {reason}")
        if self._between_chunks and data[-2:] != b"\r\n":
            self._between_chunks = False  # a part of the next size has arrived
        complete = self._message_complete
        if body := self._body:
            self._framing_bytes = 0
            piece = b"".join(body)  # one chunk, as is usual, is not copied
            body.clear()
            if not response.feed(piece, complete) and not complete and not self._paused:
                assert self._transport is not None
                self._paused = True
                self._transport.pause_reading()
        elif broken is None and self._framing_bytes > MAX_HEAD_BYTES:
            fault = f"over {MAX_HEAD_BYTES} bytes of headers, trailers or chunk extensions"
            broken = EngineProtocolError(f"{self._pool.address} sent {fault}")
        if broken is not None:
            self._fail(broken)
        elif complete:
            self._finish(reusable=self._keep_alive)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._tcp = None
        self._pool.discard(self)
        self._cancel_timer()
        if self._response is None:
            return
        if self._until_close and self._awaiting is None and exc is None:
            self._finish(reusable=False)
        elif not self._last_byte:
            self._fail(ClosedBeforeResponse(f"{self._pool.address} closed without an answer"))
        else:
            self._fail(EngineDied(f"{self._pool.address} closed in the middle of an answer"))

    # httptools callbacks. An exception raised in one becomes an HttpParserCallbackError.

    def on_message_begin(self) -> None:
        if self._message_complete:
            raise ValueError("bytes after the end of the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        headers = self._headers
        if headers is not None:
            headers.append((name.lower(), value))
            return
        # A trailer is dropped: it must not pass for a header field (RFC 9110, section 6.5.1).
        self._trailer_bytes += len(name) + len(value)
        if self._trailer_bytes > MAX_HEAD_BYTES:
            raise ValueError(f"over {MAX_HEAD_BYTES} bytes of trailers")

    def on_headers_complete(self) -> None:
        response, awaiting = self._response, self._awaiting
        if response is None or awaiting is None:
            raise ValueError("a response without a request")
        status = self._parser.get_status_code()
        by_name = dict(response.headers)
        has_coding = b"transfer-encoding" in by_name
        if has_coding:
            # The parser removes the last coding only, and the header is not forwarded to clients.
            codings = [v for n, v in response.headers if n == b"transfer-encoding"]
            if len(codings) > 1 or codings[0].strip().lower() != b"chunked":
                raise ValueError("a transfer coding other than chunked")
        if (
            self._framing_bytes > MAX_HEAD_BYTES
            and sum(len(n) + len(v) for n, v in response.headers) > MAX_HEAD_BYTES
        ):
            raise ValueError(f"over {MAX_HEAD_BYTES} bytes of response headers")
        if status < 200 or status > 599:
            if status == 101:
                raise ValueError("an upgrade without a request for one")
            if not 100 <= status < 200:
                raise ValueError(f"the status {status}")
            response.headers.clear()  # 1xx: the final response follows
            return
        response.status = status
        framed = has_coding or b"content-length" in by_name or status in (204, 304)
        self._until_close = not framed
        self._awaiting = self._headers = None
        if not awaiting.done():
            awaiting.set_result(response)  # the caller runs after this read of the socket

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_message_complete(self) -> None:
        response = self._response
        if response is not None and response.status >= 200:
            self._message_complete = True
            self._keep_alive = self._parser.should_keep_alive()

    # The end of an exchange

    def _finish(self, *, reusable: bool) -> None:
        """End an exchange whose response is complete; another may follow on an open connection.

        After a response that arrived before the whole request was sent, the rest is still buffered.
        """
        response, self._response = self._response, None
        transport, tcp = self._transport, self._tcp
        if (
            reusable
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
            and (tcp is None or not tcp.get_write_buffer_size())
        ):
            if self._paused:
                self.resume()
            self.idle_since = self._last_byte
            self._pool.release(self)
        elif transport is not None:
            self._pool.discard(self)
            transport.abort()
        if response is not None:
            response.finish()

    def _fail(self, error: EngineError) -> None:
        awaiting = self._awaiting
        response = self._end()
        if self._transport is not None:
            self._transport.abort()
        if awaiting is not None:
            if not awaiting.done():
                awaiting.set_exception(error)
        elif response is not None:
            response.fail(error)

    def _end(self) -> ResponseBody | None:
        """End the exchange, if there is one, and leave the pool; return its response."""
        self._pool.discard(self)
        response, self._response = self._response, None
        self._awaiting = self._headers = None
        return response

    # `MovingDeadline`

    def _due(self) -> float | None:
        if self._response is None:
            return None  # the next exchange sets the timer again
        if self._awaiting is not None:
            return self._sent_at + self._pool.timeouts.first_byte_s
        stall_s = self._pool.timeouts.stall_s
        return (self._loop.time() if self._paused else self._last_byte) + stall_s

    def _expire(self) -> None:
        if self._awaiting is not None:
            after = self._pool.timeouts.first_byte_s
            self._fail(FirstByteTimeout(f"{self._pool.address} gave no answer in {after:g} s"))
        else:
            after = self._pool.timeouts.stall_s
            self._fail(StallTimeout(f"{self._pool.address} sent nothing for {after:g} s"))
