"""The protocol of one client connection: bounds, deadlines, refusals, and whose request it is.

A request of the data plane becomes an `HttpExchange` with a task of its own; every other request
goes through uvicorn's cycle to the ASGI application.
"""

import asyncio
import logging
from enum import Enum, auto
from functools import lru_cache, partial
from math import inf
from time import perf_counter
from typing import Any, ClassVar, NoReturn, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr, get_remote_addr

from app.asgi import REFUSED, Dispatcher, ExchangeHandler, Headers
from app.errors import (
    BadRequest,
    GatewayError,
    HeadTooLarge,
    RequestTimeout,
    TooManyConnections,
)
from app.server.connection.asgi_transport import AsgiTransport, error_response, without_chunks
from app.server.connection.bounds import ConnectionBounds, PeerConnections
from app.server.connection.exchange import HttpExchange
from app.server.connection.framing import FRAMING_FIELDS, content_length, is_chunked
from app.server.connection.input_buffer import InputBuffer
from app.server.connection.uvicorn_hooks import check_hooks
from engines.timing import ONE_TURN_S

check_hooks(HttpToolsProtocol)

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
# The relay's own timer comes first, for it can say in its record what happened.
STALL_SLACK_S = 1.0
# How long a client that was refused may go on sending before it is cut off. Closing at once would
# reset the connection, and the client might see that instead of the answer.
LINGER_S = 2.0
# Header fields that the connection itself goes by.
_READ_FIELDS = FRAMING_FIELDS | {b"expect"}
# What a request that asks for an upgrade loses when it is taken without one.
_UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})


class _Phase(Enum):
    IDLE = auto()  # between two requests, and while one is answered
    HEAD = auto()
    BODY = auto()


_SHORT_URL = 64
# Decoding one takes longer than looking it up.
_METHODS = {b"POST": "POST", b"GET": "GET"}
# A member of an enumeration takes Python 3.11 longer to look up than a name.
_IDLE, _HEAD, _BODY = _Phase


def _target(url: bytes) -> tuple[str, bytes]:
    """Return path and query of a request, the path unquoted as uvicorn does it.

    Raises httptools.HttpParserInvalidURLError and UnicodeDecodeError.
    """
    parsed = httptools.parse_url(url)
    path = (parsed.path or b"").decode("ascii")
    return unquote(path) if "%" in path else path, parsed.query or b""


# Of short ones, clients use few.
_known_target = lru_cache(maxsize=256)(_target)


class ClientConnection(HttpToolsProtocol):
    """Protocol of one connection. Each server has a subclass, with its bounds and its peers."""

    bounds: ClassVar[ConnectionBounds]
    peers: ClassVar[PeerConnections]
    dispatcher: ClassVar[Dispatcher | None] = None
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
        self._counted_peer: str | None = None  # the address that this connection is counted under
        self._refusal: GatewayError | None = None
        self._deaf = False  # nothing more is read from this client
        self._upgrading = False
        # When the client has to have sent what is awaited; inf while it is the client that waits.
        self._due = inf
        # Moved when it fires, so that a request sets none. Invariant: it fires by `_due`.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = inf
        # Runs while the client leaves unread more than a connection buffers.
        self._stall: asyncio.TimerHandle | None = None
        # The request that is being answered; `cycle` is the last one that was read.
        self._running: HttpExchange | RequestResponseCycle | None = None
        # A request of the data plane that has been read as far as it has arrived, and not begun.
        self._unbegun: HttpExchange | None = None

    def on_refusal(self, error: GatewayError) -> None:
        """Note a request that was refused here, and that no application sees."""
        raise NotImplementedError

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.connections.add(self)
        self.transport = transport
        self.flow = InputBuffer(transport, self.loop, self._parse_buffered)
        self.client = get_remote_addr(transport)
        self.scheme = "http"
        peer = self.client[0] if self.client is not None else None
        if len(self.connections) > self.bounds.connections:
            self._refuse_connection("the gateway has too many connections; try again")
        elif peer is not None and not self.peers.admit(peer, self.bounds.connections_per_peer):
            self._refuse_connection("too many connections from this address; try again")
        else:
            self._counted_peer = peer
            self._expect(self.bounds.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._counted_peer is not None:
            self.peers.release(self._counted_peer)
        self.flow.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stall is not None:
            self._stall.cancel()
        running = self._running
        # Each holds this connection: without the circle it is freed at once.
        self._running = self._unbegun = None
        self.cycle = cast(RequestResponseCycle, None)
        self.pipeline.clear()
        super().connection_lost(exc)
        if isinstance(running, HttpExchange):
            running.disconnect()
        elif running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
            self._part(running)

    @property
    def peer(self) -> str:
        """The client's address; "" where there is none, as on a Unix socket."""
        return self.client[0] if self.client is not None else ""

    def common_headers(self) -> Headers:
        """See `app.server.connection.exchange.Carrier`."""
        return self.server_state.default_headers

    def data_received(self, data: bytes) -> None:
        if not self._deaf:
            self._parse(self.flow.take() + data if self.flow.unparsed else data)

    def _parse_buffered(self) -> None:
        """Go on with what was received and not parsed, if anything, and read on."""
        if not self._deaf and not self.transport.is_closing():
            self._parse(self.flow.take())

    def _parse(self, data: bytes) -> None:
        """Parse as much as one turn of the loop may take and the application keeps up with."""
        before = self._phase
        flow = self.flow
        start, size = 0, len(data)
        turn_ends = perf_counter() + TURN_S if size > SLICE else inf
        if self.pipeline:
            self._bound_pipeline()
        try:
            while start < size and not flow.read_paused:
                if start and perf_counter() >= turn_ends:
                    break
                end = start + SLICE
                if self._phase is _BODY and self._body_left > SLICE and not self.pipeline:
                    end = start + self._body_left
                self._feed(data[start:end])
                start = end
                if self.pipeline:
                    self._bound_pipeline()
        except httptools.HttpParserError as error:
            log.debug("a client broke HTTP/1.1: %s", error)
            self._go_on()  # it was good as far as it had come
            self._refuse(self._refusal or BadRequest("this is not an HTTP/1.1 request"))
            return
        if start < size or flow.read_paused or flow.socket_paused:
            flow.keep(data[start:])
        if data or self._phase is not _IDLE:
            self._set_deadline(before)
        self._go_on()

    def _go_on(self) -> None:
        """Begin the request that has been read, or tell the one under way what has come of it.

        After the parser has returned: what is called here may write, close and read.
        """
        if self._unbegun is not None:
            exchange, self._unbegun = self._unbegun, None
            self._begin(exchange)
        elif isinstance(self._running, HttpExchange):
            self._running.wake_reader()

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
            self._due = inf
        elif self._phase is not before or self._due == inf:
            body = self._phase is _BODY
            self._expect(self.bounds.body_timeout_s if body else self.bounds.header_timeout_s)
        elif self._phase is _IDLE and self._due > self.loop.time() + self.bounds.header_timeout_s:
            self._expect(self.bounds.header_timeout_s)  # blank lines are no idle connection

    @property
    def _busy(self) -> bool:
        """Whether a request is being answered. Blank lines alone are none."""
        return self._running is not None and not self._running.response_complete

    def _feed(self, data: bytes) -> None:
        self._read = size = len(data)
        if self._phase is _BODY:
            self._idle_bytes += size
        else:
            self._head_bytes += size
        self._pipelined_bytes = self._pipelined_bytes + size if self.pipeline else 0
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade() + data[upgrade.args[0] :]
        phase = self._phase
        if phase is _HEAD and self._head_bytes > MAX_HEAD_BYTES:
            self._reject(HeadTooLarge(f"the request's head is over {MAX_HEAD_BYTES} bytes"))
        if phase is _BODY and self._idle_bytes > MAX_HEAD_BYTES:
            self._reject(HeadTooLarge(f"the request's trailers are over {MAX_HEAD_BYTES} bytes"))

    def _reject(self, error: GatewayError) -> NoReturn:
        """Have the parser stop, and the request refused with an error."""
        self._refusal = error
        raise httptools.HttpParserError

    # The parser's callbacks

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._phase = _HEAD
        self._begun_in = self._read
        self._body_left = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        # A trailer is dropped: it must not pass for a header field (RFC 9110, section 6.5.1).
        if self._phase is _BODY:
            return
        headers = self.headers
        name = name.lower()
        if name in _READ_FIELDS or len(headers) == MAX_HEADERS:
            self._read_field(name, value)
        headers.append((name, value))

    def _read_field(self, name: bytes, value: bytes) -> None:
        """Go by a header field, or refuse it as one too many."""
        if len(self.headers) == MAX_HEADERS:
            self._reject(HeadTooLarge(f"the request has over {MAX_HEADERS} header fields"))
        if name == b"expect":
            self.expect_100_continue |= value.lower() == b"100-continue"
        elif name == b"content-length":
            length = content_length(value)
            if length is None:
                self._reject(BadRequest("content-length is no number, or has too many digits"))
            self._body_left = length
        elif name == b"transfer-encoding" and (
            not is_chunked(value) or any(name == field for field, _ in self.headers)
        ):
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
        handler = None
        if self.dispatcher is not None:
            url = self.url
            path, query = (_known_target if len(url) <= _SHORT_URL else _target)(url)
            method = _METHODS.get(self.parser.get_method()) or self.parser.get_method().decode()
            handler = self.dispatcher.find_handler(method, path, self.headers)
        if handler is None:
            self._take_cycle()
        else:
            self._take_exchange(handler, method, path, query)
        self._head_bytes = self._idle_bytes = self._begun_in = 0
        self._phase = _BODY

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        self._body_left -= len(body)
        if isinstance(self.cycle, HttpExchange):
            self.cycle.feed_body(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._phase = _IDLE
        if isinstance(self.cycle, HttpExchange):
            self.cycle.more_body = False
        else:
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

    # Requests and their responses

    def _take_exchange(
        self, handler: ExchangeHandler, method: str, path: str, query: bytes
    ) -> None:
        """Have a request of the data plane begun once it has been read as far as it has come."""
        busy = self._busy
        version_1_0 = self.parser.get_http_version() == "1.0"
        exchange = HttpExchange(
            self,
            handler,
            method,
            path,
            query,
            self.headers,
            version_1_0=version_1_0,
            keep_alive=not version_1_0 and self.parser.should_keep_alive(),
            expects_continue=self.expect_100_continue,
        )
        self.cycle = exchange  # type: ignore[assignment]
        if busy:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))
        else:
            self._running = self._unbegun = exchange

    def _begin(self, exchange: HttpExchange) -> None:
        """Start the task of an exchange."""
        if exchange is self._running and not self.transport.is_closing():
            self.tasks.add(exchange.start())

    def _take_cycle(self) -> None:
        """Have the ASGI application serve a request, through uvicorn's cycle."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        if self.server is None:
            self.server = get_local_addr(self.transport)
        HttpToolsProtocol.on_message_begin(self)
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        HttpToolsProtocol.on_headers_complete(self)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if isinstance(cycle, HttpExchange):  # the next of several that were pipelined
            cycle.received_at = perf_counter()
            self.loop.call_soon(self._begin, cycle)
            return
        cycle.transport = cast(asyncio.Transport, AsgiTransport(cycle, self.close_behind))
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False  # it knows no 100 (RFC 9110, section 10.1.1)
            app = partial(without_chunks, app, cycle)
        super()._start_asgi_task(cycle, app)

    def exchange_completed(self, exchange: HttpExchange) -> None:
        """See `app.server.connection.exchange.Carrier`."""
        if exchange is self._running:
            if not exchange.keep_alive:
                self.close_behind(exchange)
            self.on_response_complete()

    def exchange_ended(self, exchange: HttpExchange, task: asyncio.Task[None]) -> None:
        """See `app.server.connection.exchange.Carrier`."""
        self.tasks.discard(task)
        if (
            exchange is self._running
            and not exchange.response_complete
            and not exchange.disconnected
        ):
            self._close()  # the client sees by it that the response is not whole

    def on_response_complete(self) -> None:
        """Go on with the next request, or wait for one."""
        self.server_state.total_requests += 1
        running = self._running
        if isinstance(running, RequestResponseCycle):
            self._part(running)
        if self.transport.is_closing():
            return
        if running is not None and self.expect_100_continue and running.more_body:
            # It was not told to go on: its next bytes may be the body or a new request.
            self._close()
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self._phase is _IDLE:
            self._expect(self.timeout_keep_alive)
        elif self._due == inf:
            self._expect(self.bounds.header_timeout_s)

    def _part(self, cycle: RequestResponseCycle) -> None:
        """Take a cycle and its request apart.

        Without the circle they go when nobody uses them; the garbage collector would find them late
        and have little else to look at.
        """
        cycle.body = bytearray()  # nobody will read it, and the connection may idle
        cycle.transport = self.transport

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

    def close_behind(self, cycle: HttpExchange | RequestResponseCycle) -> None:
        """Let the client go when it has what waits for it, or does not read that in time."""
        if cycle.response_complete and cycle.more_body:
            # It may see the answer only once it has sent its body; the body's deadline runs on.
            self._stop_parsing()
            self.transport.write_eof()
            return
        self._close()

    def _close(self) -> None:
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._abort_later(self.timeout_keep_alive)
        else:
            self._due = inf

    def _abort_later(self, seconds: float) -> None:
        """Give a client that is let go some time to read what waits for it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self.transport.abort)
        self._timer_due = -inf  # no deadline takes its place

    # Refusals

    def _refuse_connection(self, reason: str) -> None:
        self.connections.discard(self)  # it takes nobody's place while it lingers
        self._refuse(TooManyConnections(reason))

    def _stop_parsing(self) -> None:
        """Read on, to see the client go, but drop whatever it sends."""
        self._deaf = True
        self.flow.discard()

    def _expect(self, seconds: float) -> None:
        """Give the client some time to send what is awaited."""
        self._due = due = self.loop.time() + seconds
        if self._timer is None or due < self._timer_due:
            self._set_timer(due)

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self.loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._due == inf:
            return
        if self._due > self.loop.time():
            self._set_timer(self._due)
        else:
            self._timer_due = self._due
            self._timer = self.loop.call_later(ONE_TURN_S, self._on_expiry)

    def _on_expiry(self) -> None:
        self._timer = None
        if self._due > self.loop.time():
            if self._due != inf:
                self._set_timer(self._due)
            return
        answered = self._phase is _BODY and not self._busy
        head = self._head_bytes + self._begun_in
        silent = head == 0 and self._phase is not _BODY and not self._busy
        if silent and self.transport.get_write_buffer_size():
            self.transport.abort()  # it never read its last answer; closing would wait for that
        elif answered or silent:
            self._close()  # there is nothing to be told
        else:
            self._refuse(RequestTimeout("the request did not come to its end in time"))

    def _refuse(self, error: GatewayError) -> None:
        """Answer a request that is not fit for the application, and let the client go."""
        self._stop_parsing()
        self._due = inf
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
        if isinstance(running, HttpExchange):
            if running.started:
                running.disconnect()
                self._close()
                return
            if running.task is None:  # it was pipelined, and is not begun yet
                self._running = None
                self.on_refusal(error)
            running.refused_status = error.status
            running.disconnect()
        elif running is not None:
            running.disconnected = True  # nobody else will tell it before the client has gone
            running.message_event.set()
            if running.response_started:
                self._close()
                return
            cast(dict[str, Any], running.scope)[REFUSED] = error.status
        else:
            self.on_refusal(error)
        self.transport.write(error_response(error))
        self.transport.write_eof()
        self._abort_later(LINGER_S)
