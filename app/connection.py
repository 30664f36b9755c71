"""One client connection: uvicorn's, with the bounds that a server on its own needs.

uvicorn leaves to a proxy in front what is done here: a bound and a deadline for a request's head
and body, refusals in JSON, connections that are counted, an upgrade that is ignored instead of
losing the body, HTTP/1.0 answers without chunks, and pipelining under which a client's leaving is
still seen. It also offers the relay a way to write a chunk without a coroutine.
"""

import asyncio
import logging
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, ClassVar, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from app.errors import (
    BadRequest,
    Dialect,
    GatewayError,
    HeadTooLarge,
    RequestTimeout,
    TooManyConnections,
)
from app.relay.exchange import ANSWER, BODY, REFUSED, WRITE, Headers

log = logging.getLogger(__name__)

# Node gives a request's head 16 KiB, nginx 32 KiB; Apache takes 100 header fields.
MAX_HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100
# Requests that wait on one connection for the one before; past them it is read no further.
MAX_PIPELINED = 16
# The lines that stand before chunks of the usual sizes; to format one takes longer than to join it.
_SIZES = tuple(b"%x\r\n" % size for size in range(4096))
# A loop that was not scheduled runs its late timers before it reads its sockets.
ONE_TURN_S = 0.01
# The relay's own timer comes first, for it can say in its record what happened.
STALL_SLACK_S = 1.0
# How long a client that was refused may go on sending before it is cut off. Closing at once would
# reset the connection, and the client might see that instead of the answer.
LINGER_S = 2.0
# What a request that asks for an upgrade loses when it is taken without one.
_UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """What one client connection may take, and how many there may be."""

    connections: int
    header_timeout_s: float
    body_timeout_s: float
    # How long a client may leave unread what waits for it.
    stall_s: float


class _Phase(Enum):
    IDLE = auto()  # between two requests, and while one is answered
    HEAD = auto()
    BODY = auto()


class ClientConnection(HttpToolsProtocol):
    """See above. A subclass sets the bounds; uvicorn makes the instances."""

    bounds: ClassVar[ConnectionBounds]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = _Phase.HEAD  # a new connection owes a request
        self._head_bytes = 0  # of a head that is not whole yet
        self._read = 0  # the size of the piece that is being read
        self._begun_in = 0  # of the piece in which the head began, with what stood before it
        self._idle_bytes = 0  # in a body and none of it: trailers, extensions of chunks
        self._refusal: GatewayError | None = None
        self._deaf = False  # nothing more is read from this client
        self._upgrading = False
        # Runs while a head or a body is awaited, and for a request that comes whole never.
        self._timer: asyncio.TimerHandle | None = None
        # Runs while the client leaves unread more than a connection buffers.
        self._stall: asyncio.TimerHandle | None = None
        # The request that is being answered; `cycle` is the last one that was read.
        self._running: RequestResponseCycle | None = None

    def on_refusal(self, error: GatewayError) -> None:
        """Note a request that was refused here, and that no application sees."""
        raise NotImplementedError

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            self.connections.discard(self)  # it takes nobody's place while it lingers
            self._refuse(TooManyConnections("the gateway has too many connections; try again"))
        else:
            self._expect(self.bounds.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        if self._stall is not None:
            self._stall.cancel()
        running = self._running
        if running is not None and not running.response_complete:
            # uvicorn tells the request that was read last, not the one that is being answered.
            running.disconnected = True
            running.message_event.set()
            self._part(running)
        super().connection_lost(exc)
        # Each holds this connection: without the circle it is freed at once.
        self._running = None
        self.cycle = cast(RequestResponseCycle, None)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        before = self._phase
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            log.debug("a client broke HTTP/1.1: %s", error)
            self._refuse(self._refusal or BadRequest("this is not an HTTP/1.1 request"))
            return
        self._read_ahead()
        if self._phase is _Phase.IDLE and self._busy:
            self._expect(None)
        elif self._phase is not before or self._timer is None:
            body = self._phase is _Phase.BODY
            self._expect(self.bounds.body_timeout_s if body else self.bounds.header_timeout_s)

    @property
    def _busy(self) -> bool:
        """Whether a request is being answered. Blank lines alone are none."""
        return self._running is not None and not self._running.response_complete

    def _feed(self, data: bytes) -> None:
        self._read = len(data)
        if self._phase is _Phase.BODY:
            self._idle_bytes += self._read
        else:
            self._head_bytes += self._read
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade() + data[upgrade.args[0] :]
        if self._phase is _Phase.HEAD and self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = HeadTooLarge(f"the request's head is over {MAX_HEAD_BYTES} bytes")
            raise httptools.HttpParserError
        if self._phase is _Phase.BODY and self._idle_bytes > MAX_HEAD_BYTES:
            self._refusal = HeadTooLarge(f"the request's trailers are over {MAX_HEAD_BYTES} bytes")
            raise httptools.HttpParserError

    def _read_ahead(self) -> None:
        """Go on reading while requests wait here: an unread socket does not tell of a hang-up."""
        if (
            self.pipeline
            and len(self.pipeline) <= MAX_PIPELINED
            and len(self.cycle.body) <= HIGH_WATER_LIMIT
        ):
            self.flow.resume_reading()

    # The parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = _Phase.HEAD
        self._begun_in = self._read

    def on_headers_complete(self) -> None:
        if len(self.headers) > MAX_HEADERS:
            self._refusal = HeadTooLarge(f"the request has over {MAX_HEADERS} header fields")
            raise ValueError
        if self._begun_in + self._head_bytes > MAX_HEAD_BYTES:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > MAX_HEAD_BYTES:
                self._refusal = HeadTooLarge(f"the request's head is over {MAX_HEAD_BYTES} bytes")
                raise ValueError
        self._upgrading = self.parser.should_upgrade()
        if self._upgrading:
            return  # taken up again without the upgrade
        super().on_headers_complete()
        self._head_bytes = self._idle_bytes = 0
        self._phase = _Phase.BODY

    def on_header(self, name: bytes, value: bytes) -> None:
        # A trailer is dropped: it must not pass for a header field (RFC 9110, section 6.5.1).
        if self._phase is not _Phase.BODY:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._upgrading:
            self._phase = _Phase.IDLE
            super().on_message_complete()

    def _decline_upgrade(self) -> bytes:
        """Return the head to read once more, as if it had not asked (RFC 9110, section 7.8)."""
        self._upgrading = False
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refusal = BadRequest("this is no proxy: CONNECT is not served")
            raise httptools.HttpParserError
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (method, self.url, version)]
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close\r\n")
        lines += [b"%b: %b\r\n" % h for h in self.headers if h[0] not in _UPGRADE_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"".join([*lines, b"\r\n"])

    # The answer

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        answer = _Answer(self, cycle)
        cycle.transport = cast(asyncio.Transport, answer)
        extensions: dict[str, Any] = {BODY: partial(_take_body, cycle)}
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False  # it knows no 100 (RFC 9110, section 10.1.1)
            app = partial(_without_chunks, app, cycle)
        else:
            extensions[WRITE] = answer.write_chunk
            extensions[ANSWER] = answer.write_whole
        cast(dict[str, Any], cycle.scope)["extensions"] = extensions
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        running = self._running
        if running is not None:
            self._part(running)
            if self.expect_100_continue and running.more_body:
                # It was not told to go on: its next bytes may be the body or a new request.
                self._close()
        super().on_response_complete()

    def _part(self, cycle: RequestResponseCycle) -> None:
        """Send what is left of an answer, and take it and its request apart.

        Without the circle they go when nobody uses them; the garbage collector would find them late
        and have little else to look at.
        """
        cast(_Answer, cycle.transport).flush()
        cycle.transport = self.transport
        cast(dict[str, Any], cycle.scope).pop("extensions", None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def _watch_reader(self, unread: int) -> None:
        after = self.bounds.stall_s + STALL_SLACK_S
        self._stall = self.loop.call_later(after, self._on_stall, unread)

    def _on_stall(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread < before:
            self._watch_reader(unread)
        else:
            self.transport.abort()

    def close_behind(self, cycle: RequestResponseCycle) -> None:
        """Let the client go when it has what waits for it, or does not read that in time."""
        if cycle.response_complete and cycle.more_body:
            # It may see the answer only once it has sent its body; the body's deadline runs on.
            self._deaf = True
            self.transport.write_eof()
            return
        self._close()

    def _close(self) -> None:
        self._expect(None)
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._timer = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # it never read its last answer; closing would wait for that
        else:
            super().timeout_keep_alive_handler()

    # Refusals

    def _expect(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self.loop.call_later(ONE_TURN_S, self._on_expiry)

    def _on_expiry(self) -> None:
        self._timer = None
        answered = self._phase is _Phase.BODY and not self._busy
        silent = self._head_bytes == 0 and self._phase is not _Phase.BODY and not self._busy
        if answered or silent:
            self._close()  # there is nothing to be told
        else:
            self._refuse(RequestTimeout("the request did not come to its end in time"))

    def _refuse(self, error: GatewayError) -> None:
        """Answer a request that is not fit for the application, and let the client go."""
        self._deaf = True
        self._expect(None)
        if self.transport.is_closing():
            return
        running = self._running if self._busy else None
        if running is not None and not running.more_body:
            # The fault is behind a good request, whose answer is not to be spoilt.
            running.keep_alive = False
            return
        if running is None and self._phase is _Phase.BODY:
            self._close()  # it has had its answer
            return
        if running is None:
            self.on_refusal(error)
        else:
            running.disconnected = True  # nobody else will tell it before the client has gone
            running.message_event.set()
            if running.response_started:
                self._close()
                return
            cast(dict[str, Any], running.scope)[REFUSED] = error.status
        self.transport.write(_answer(error))
        self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)


class _Answer:
    """A transport for one answer: its head leaves with the first of its body, in one write."""

    __slots__ = ("_connection", "_cycle", "_flow", "_flush", "_head", "_transport")

    def __init__(self, connection: ClientConnection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._flow = connection.flow
        self._cycle = cycle
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
            self._flush = self._connection.loop.call_soon(self.flush)
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
        self._connection.close_behind(self._cycle)

    def is_closing(self) -> bool:
        return self._transport.is_closing()


def _take_body(cycle: RequestResponseCycle) -> bytes | None:
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


async def _without_chunks(
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


def _answer(error: GatewayError) -> bytes:
    body = error.body(Dialect.OPENAI)
    headers = b"".join(b"%b: %b\r\n" % header for header in error.headers())
    return (
        b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b"
        b"connection: close\r\n\r\n%b" % (error.status, len(body), headers, body)
    )
