"""The protocol of one client connection: bounds, deadlines, refusals and answers."""

import asyncio
import logging
from enum import Enum, auto
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, NoReturn, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.connection.bounds import ConnectionBounds, PeerConnections
from app.connection.framing import FRAMING_FIELDS, content_length, is_chunked
from app.connection.input_buffer import InputBuffer
from app.connection.response import ResponseTransport, error_response, take_body, without_chunks
from app.errors import (
    BadRequest,
    GatewayError,
    HeadTooLarge,
    RequestTimeout,
    TooManyConnections,
)
from app.relay.exchange import ANSWER, BODY, REFUSED, WRITE

log = logging.getLogger(__name__)

# Node gives a request's head 16 KiB, nginx 32 KiB; Apache takes 100 header fields.
MAX_HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100
# Requests that wait on one connection for the one before; past them it is read no further.
MAX_PIPELINED = 16
# Bytes of such requests, heads included; what one connection holds parsed is bounded by it.
MAX_PIPELINED_BYTES = HIGH_WATER_LIMIT
# Bytes parsed between two looks at the bounds, unless they belong to a body of known length. The
# shortest request has 18 bytes; it takes 20 µs to parse, and 2 KiB of memory.
SLICE = 2048
# Time that one connection may parse in one turn of the event loop.
TURN_S = 0.001
# A loop that was not scheduled runs its late timers before it reads its sockets.
ONE_TURN_S = 0.01
# The relay's own timer comes first, for it can say in its record what happened.
STALL_SLACK_S = 1.0
# How long a client that was refused may go on sending before it is cut off. Closing at once would
# reset the connection, and the client might see that instead of the answer.
LINGER_S = 2.0
# What a request that asks for an upgrade loses when it is taken without one.
_UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})


class _Phase(Enum):
    IDLE = auto()  # between two requests, and while one is answered
    HEAD = auto()
    BODY = auto()


# A member of an enumeration takes Python 3.11 longer to look up than a name.
_IDLE, _HEAD, _BODY = _Phase


class ClientConnection(HttpToolsProtocol):
    """Protocol of one connection. Each server has a subclass, with its bounds and its peers."""

    bounds: ClassVar[ConnectionBounds]
    peers: ClassVar[PeerConnections]
    flow: InputBuffer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = _HEAD  # a new connection owes a request
        self._head_bytes = 0  # of a head that is not whole yet
        self._read = 0  # the size of the piece that is being read
        self._begun_in = 0  # of the piece in which the head began, with what stood before it
        self._idle_bytes = 0  # in a body and none of it: trailers, extensions of chunks
        self._body_left = 0  # of a body whose length the head told
        self._pipelined_bytes = 0  # parsed behind the running request, since none waited
        self._peer: str | None = None  # the address that this connection is counted under
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
        self.flow = InputBuffer(transport, self.loop, self._parse_buffered)
        peer = self.client[0] if self.client is not None else None
        if len(self.connections) > self.bounds.connections:
            self._refuse_connection("the gateway has too many connections; try again")
        elif peer is not None and not self.peers.admit(peer, self.bounds.connections_per_peer):
            self._refuse_connection("too many connections from this address; try again")
        else:
            self._peer = peer
            self._expect(self.bounds.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._peer is not None:
            self.peers.release(self._peer)
        self.flow.close()
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
        if not self._deaf:
            self._parse(self.flow.take() + data if self.flow.unparsed else data)

    def _parse_buffered(self) -> None:
        """Go on with what was received and not parsed, if anything, and read on."""
        if not self._deaf and not self.transport.is_closing():
            self._parse(self.flow.take())

    def _parse(self, data: bytes) -> None:
        """Parse as much as one turn of the loop may take and the application keeps up with."""
        if data:
            self._unset_keepalive_if_required()
        before = self._phase
        flow = self.flow
        start, size = 0, len(data)
        turn_ends = perf_counter() + TURN_S
        if self.pipeline:
            self._bound_pipeline()
        try:
            while start < size and not flow.read_paused:
                if start and perf_counter() >= turn_ends:
                    break
                whole = self._phase is _BODY and not self.pipeline
                end = start + (max(self._body_left, SLICE) if whole else SLICE)
                self._feed(data[start:end])
                start = end
                if self.pipeline:
                    self._bound_pipeline()
        except httptools.HttpParserError as error:
            log.debug("a client broke HTTP/1.1: %s", error)
            self._refuse(self._refusal or BadRequest("this is not an HTTP/1.1 request"))
            return
        if start < size or flow.read_paused or flow.socket_paused:
            flow.keep(data[start:])
        if data or self._phase is not _IDLE:
            self._set_deadline(before)

    def _bound_pipeline(self) -> None:
        """Parse on behind a running request up to a bound.

        An unread socket does not tell of a hang-up, so reading does not just stop.
        """
        if len(self.pipeline) > MAX_PIPELINED or self._pipelined_bytes > MAX_PIPELINED_BYTES:
            self.flow.pause_reading()
        else:
            self.flow.unpause()

    def _set_deadline(self, before: _Phase) -> None:
        """Bound the wait for the client, unless it is the client that waits."""
        if (self._phase is _IDLE and self._busy) or (self.pipeline and self.flow.read_paused):
            self._expect(None)
        elif self._phase is not before or self._timer is None:
            body = self._phase is _BODY
            self._expect(self.bounds.body_timeout_s if body else self.bounds.header_timeout_s)

    @property
    def _busy(self) -> bool:
        """Whether a request is being answered. Blank lines alone are none."""
        return self._running is not None and not self._running.response_complete

    def _feed(self, data: bytes) -> None:
        self._read = len(data)
        if self._phase is _BODY:
            self._idle_bytes += self._read
        else:
            self._head_bytes += self._read
        self._pipelined_bytes = self._pipelined_bytes + self._read if self.pipeline else 0
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade() + data[upgrade.args[0] :]
        if self._phase is _HEAD and self._head_bytes > MAX_HEAD_BYTES:
            self._reject(HeadTooLarge(f"the request's head is over {MAX_HEAD_BYTES} bytes"))
        if self._phase is _BODY and self._idle_bytes > MAX_HEAD_BYTES:
            self._reject(HeadTooLarge(f"the request's trailers are over {MAX_HEAD_BYTES} bytes"))

    def _reject(self, error: GatewayError) -> NoReturn:
        """Have the parser stop, and the request refused with an error."""
        self._refusal = error
        raise httptools.HttpParserError

    # The parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = _HEAD
        self._begun_in = self._read
        self._body_left = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        # A trailer is dropped: it must not pass for a header field (RFC 9110, section 6.5.1).
        if self._phase is _BODY:
            return
        if len(self.headers) == MAX_HEADERS:
            self._reject(HeadTooLarge(f"the request has over {MAX_HEADERS} header fields"))
        name = name.lower()
        if name in FRAMING_FIELDS:
            self._read_framing(name, value)
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def _read_framing(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            length = content_length(value)
            if length is None:
                self._reject(BadRequest("content-length is no number, or has too many digits"))
            self._body_left = length
        elif not is_chunked(value) or any(name == field for field, _ in self.headers):
            # Who is between may have read another end of the body (RFC 9112, section 6.1).
            self._reject(BadRequest("transfer-encoding must be chunked, and nothing else"))

    def on_headers_complete(self) -> None:
        if self._begun_in + self._head_bytes > MAX_HEAD_BYTES:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > MAX_HEAD_BYTES:
                self._reject(HeadTooLarge(f"the request's head is over {MAX_HEAD_BYTES} bytes"))
        self._upgrading = self.parser.should_upgrade()
        if self._upgrading:
            return  # taken up again without the upgrade
        super().on_headers_complete()
        self._head_bytes = self._idle_bytes = self._begun_in = 0
        self._phase = _BODY

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._upgrading:
            self._phase = _IDLE
            super().on_message_complete()

    def _decline_upgrade(self) -> bytes:
        """Return the head to read once more, as if it had not asked (RFC 9110, section 7.8)."""
        self._upgrading = False
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._reject(BadRequest("this is no proxy: CONNECT is not served"))
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
        answer = ResponseTransport(cycle, self.loop, self.close_behind)
        cycle.transport = cast(asyncio.Transport, answer)
        extensions: dict[str, Any] = {BODY: partial(take_body, cycle)}
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False  # it knows no 100 (RFC 9110, section 10.1.1)
            app = partial(without_chunks, app, cycle)
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
        cast(ResponseTransport, cycle.transport).flush()
        cycle.body = bytearray()  # nobody will read it, and the connection may idle
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
            self._stop_parsing()
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

    def _refuse_connection(self, reason: str) -> None:
        self.connections.discard(self)  # it takes nobody's place while it lingers
        self._refuse(TooManyConnections(reason))

    def _stop_parsing(self) -> None:
        """Read on, to see the client go, but drop whatever it sends."""
        self._deaf = True
        self.flow.discard()

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
        answered = self._phase is _BODY and not self._busy
        head = self._head_bytes + self._begun_in
        silent = head == 0 and self._phase is not _BODY and not self._busy
        if answered or silent:
            self._close()  # there is nothing to be told
        else:
            self._refuse(RequestTimeout("the request did not come to its end in time"))

    def _refuse(self, error: GatewayError) -> None:
        """Answer a request that is not fit for the application, and let the client go."""
        self._stop_parsing()
        self._expect(None)
        if self.transport.is_closing():
            return
        running = self._running if self._busy else None
        if running is not None and not running.more_body:
            # The fault is behind a good request, whose answer is not to be spoilt.
            running.keep_alive = False
            return
        if running is None and self._phase is _BODY:
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
        self.transport.write(error_response(error))
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)
