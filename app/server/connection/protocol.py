"""The protocol of one client connection: which request runs, timeouts, refusals, and closing.

`RequestParser` parses; here a request of the data plane becomes an `HttpExchange` with a task of
its own, and every other one runs through uvicorn's cycle in the ASGI application.
"""

import asyncio
import logging
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr, get_remote_addr

from app.asgi import REFUSED, ExchangeHandler, Headers
from app.errors import BadRequest, GatewayError, RequestTimeout, TooManyConnections
from app.server.connection.asgi_transport import AsgiTransport, error_response, without_chunks
from app.server.connection.bounds import ConnectionBounds, PeerConnections
from app.server.connection.exchange import HttpExchange
from app.server.connection.input_buffer import InputBuffer
from app.server.connection.known_head import HeaderList, KnownHead
from app.server.connection.receive_deadline import ReceiveDeadline
from app.server.connection.request_parser import BODY, IDLE, Phase, RequestParser

log = logging.getLogger(__name__)

# Pipelined requests that may wait on one connection; past these it is read no further.
MAX_PIPELINED = 16
# Bytes of pipelined requests, headers included; bounds the parsed data that a connection holds.
MAX_PIPELINED_BYTES = HIGH_WATER_LIMIT
# Bytes parsed between two checks of the bounds, unless they belong to a body of known length. The
# shortest request has 18 bytes; it takes 20 µs to parse, and 2 KiB of memory.
SLICE = 2048
# Time that one connection may parse in one iteration of the event loop.
MAX_PARSE_S = 0.001
# The relay's own stall timer expires first, since the relay can record the reason.
STALL_SLACK_S = 1.0
# Seconds for which a refused client may go on sending before it is disconnected. Closing at once
# would reset the connection, and the client might see the reset instead of the response.
LINGER_S = 2.0
# A client whose head still changes after so many requests has a head for each.
MAX_PARSED_HEADS = 5
# Seconds for which a server that closes its connections keeps an idle one: its client may have sent
# a request that is still on the way.
LAST_IDLE_S = 1.0


class ClientConnection(RequestParser):
    """Protocol of one connection. Each server has a subclass with its bounds and peers."""

    bounds: ClassVar[ConnectionBounds]
    peers: ClassVar[PeerConnections]
    # The server has stopped accepting: each response announces the end of its connection.
    finishing: ClassVar[bool] = False
    flow: InputBuffer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counted_peer: str | None = None  # the address that this connection is counted under
        self._discarding = False  # whatever the client sends is dropped unparsed
        self._deadline = ReceiveDeadline(self.loop, self._on_expiry)
        self._idle_s: float = self.timeout_keep_alive  # between two requests
        # Runs while the client leaves more unread than a connection buffers.
        self._stall_timer: asyncio.TimerHandle | None = None
        # The request that is being answered; `cycle` is the last one that was parsed.
        self._running: HttpExchange | RequestResponseCycle | None = None
        # A request of the data plane whose task starts when the parser has returned.
        self._unstarted: HttpExchange | None = None
        self._known_head: KnownHead | None = None
        self._parsed_heads = 0

    def on_refusal(self, error: GatewayError) -> None:
        """Record a request that is refused here and reaches no application; default: do nothing."""

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.connections.add(self)
        self.transport = transport
        self.flow = InputBuffer(transport, self.loop, self._parse_buffered)
        self.client = get_remote_addr(transport)
        self.scheme = "https" if transport.get_extra_info("ssl_object") is not None else "http"
        # "" where there is no address, as on a Unix socket.
        self.peer = self.client[0] if self.client is not None else ""
        bounded = self._bounded_peer()
        if len(self.connections) > self.bounds.connections:
            self._refuse_connection("the gateway has too many connections; try again")
        elif bounded is not None and not self.peers.admit(
            bounded, self.bounds.connections_per_peer
        ):
            self._refuse_connection("too many connections from this address; try again")
        else:
            self._counted_peer = bounded
            self._deadline.expect(self.bounds.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._counted_peer is not None:
            self.peers.release(self._counted_peer)
        self.flow.close()
        self._deadline.close()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        running = self._running
        # Each references this connection: without the cycles it is freed at once.
        self._running = self._unstarted = None
        self.cycle = cast(RequestResponseCycle, None)
        self.pipeline.clear()
        super().connection_lost(exc)
        if isinstance(running, HttpExchange):
            running.disconnect()
        elif running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
            self._unlink_cycle(running)

    def _bounded_peer(self) -> str | None:
        """Return the address whose connections are bounded in number; None: they are not."""
        return self.peer or None

    # `app.server.connection.exchange.Connection`

    def peer_of(self, headers: Headers) -> str:
        return self.peer

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        known, flow, running = self._known_head, self.flow, self._running
        busy = running is not None and not running.response_complete
        if known is None or self._phase is not IDLE or busy or flow.unparsed:
            self._parse(flow.take() + data if flow.unparsed else data)
        elif (found := known.read(data)) is None or not self._accept_known(known, *found):
            self._parse(data)

    def _parse_buffered(self) -> None:
        """Parse what the buffer holds, if anything, and resume reading."""
        if not self._discarding and not self.transport.is_closing():
            self._parse(self.flow.take())

    def _parse(self, data: bytes) -> None:
        """Parse within MAX_PARSE_S, until the application needs a pause; buffer the rest."""
        phase_before, flow, size = self._phase, self.flow, len(data)
        if self.pipeline:
            self._check_pipeline_bounds()
        try:
            start = self._feed_slices(data)
        except httptools.HttpParserError as error:
            log.debug("request is not valid HTTP/1.1: %s", error)
            self._start_or_wake()  # what precedes the fault is valid
            self._refuse(self._refusal or BadRequest("this is not an HTTP/1.1 request"))
            return
        if start < size or flow.read_paused or flow.socket_paused:
            flow.keep(data[start:])
        if data or self._phase is not IDLE:
            self._update_deadline(phase_before)
        if self._unstarted is not None and start >= size and phase_before is self._phase is IDLE:
            self._keep_head(data, self._unstarted)
        self._start_or_wake()

    def _feed_slices(self, data: bytes) -> int:
        """Parse slice by slice; return where that has stopped, or more. Raises HttpParserError."""
        start, size = 0, len(data)
        parse_until = perf_counter() + MAX_PARSE_S
        while start < size and not self.flow.read_paused:
            if start and perf_counter() >= parse_until:
                break
            end = start + SLICE
            if self._phase is BODY and self._body_left > SLICE and not self.pipeline:
                end = start + self._body_left
            self._feed(data[start:end])
            start = end
            if self.pipeline:
                self._check_pipeline_bounds()
        return start

    def _start_or_wake(self) -> None:
        """Start the request whose headers were parsed, or wake the one that waits for its body.

        Runs after the parser has returned, since both may write, read, and close the connection.
        """
        exchange = self._unstarted
        if exchange is not None:
            self._unstarted = None
            self._start_exchange(exchange)
        elif isinstance(self._running, HttpExchange):
            self._running.wake_reader()

    def _check_pipeline_bounds(self) -> None:
        """Pause parsing when the pipelined requests have reached their bounds.

        Up to there requests are parsed while one runs: an unread socket reports no disconnect.
        """
        if len(self.pipeline) > MAX_PIPELINED or self._pipelined_bytes > MAX_PIPELINED_BYTES:
            self.flow.pause_reading()
        else:
            self.flow.read_paused = False  # before the parser returns

    def _update_deadline(self, phase_before: Phase) -> None:
        """Set the deadline of what the client has to send next; none while the client waits."""
        deadline, header_s = self._deadline, self.bounds.header_timeout_s
        if (self._phase is IDLE and self._busy) or (self.pipeline and self.flow.read_paused):
            deadline.due = inf
        elif self._phase is not phase_before or deadline.due == inf:
            deadline.expect(self.bounds.body_timeout_s if self._phase is BODY else header_s)
        elif self._phase is IDLE and deadline.due > self.loop.time() + header_s:
            deadline.expect(header_s)  # blank lines do not make an idle connection

    @property
    def _busy(self) -> bool:
        """True while a request is being answered."""
        return self._running is not None and not self._running.response_complete

    # Requests and their responses

    def _accept_exchange(
        self, handler: ExchangeHandler, method: str, path: str, query: bytes
    ) -> None:
        """Create the exchange of a request; its task starts when the parser has returned."""
        exchange = HttpExchange(self, handler, method, path, query, self.headers)
        if self.parser.get_http_version() == "1.0":
            exchange.version_1_0 = True
            exchange.keep_alive = False
        elif self.expect_100_continue:  # HTTP/1.0 has no 100 (RFC 9110, section 10.1.1)
            exchange.expects_continue = True
        if self.finishing or not self.parser.should_keep_alive():
            exchange.keep_alive = False
        self.cycle = exchange  # type: ignore[assignment]
        if self._busy:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))
        else:
            self._running = self._unstarted = exchange

    def _keep_head(self, data: bytes, exchange: HttpExchange) -> None:
        """Keep the head of a request that is all of `data`, to read the next one by."""
        if self.pipeline or exchange.version_1_0 or not exchange.keep_alive:
            return
        self._parsed_heads += 1
        if 1 < self._parsed_heads <= MAX_PARSED_HEADS:  # not of a connection with one request
            self._known_head = KnownHead.of(
                data, exchange.method, exchange.path, exchange.query, exchange.headers
            )

    def _accept_known(self, head: KnownHead, headers: HeaderList, body: bytes) -> bool:
        """Start a whole request that has the head of the previous one.

        Returns False for one that belongs to the ASGI application by now.
        """
        assert self.dispatcher is not None
        handler = self.dispatcher.find_handler(head.method, head.path, headers)
        if handler is None:
            return False
        exchange = HttpExchange(
            self, handler, head.method, head.path, head.query, headers, head.facts, body
        )
        if self.finishing:
            exchange.keep_alive = False
        self.cycle = exchange  # type: ignore[assignment]
        self._running = exchange
        self._deadline.due = inf  # the client waits
        if not self.transport.is_closing():
            exchange.start()
        return True

    def _start_exchange(self, exchange: HttpExchange) -> None:
        """Start the task of an exchange unless the client has disconnected."""
        if exchange is self._running and not self.transport.is_closing():
            exchange.start()

    def _accept_asgi_request(self) -> None:
        """Run a request through uvicorn's cycle in the ASGI application."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        if self.server is None:
            self.server = get_local_addr(self.transport)
        HttpToolsProtocol.on_message_begin(self)
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        HttpToolsProtocol.on_headers_complete(self)
        if self.finishing:
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if isinstance(cycle, HttpExchange):  # a pipelined request
            cycle.received_at = perf_counter()
            self.loop.call_soon(self._start_exchange, cycle)
            return
        cycle.transport = cast(asyncio.Transport, AsgiTransport(cycle, self.close_after_response))
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False  # HTTP/1.0 has no 100 (RFC 9110, section 10.1.1)
            app = partial(without_chunks, app, cycle)
        super()._start_asgi_task(cycle, app)

    def exchange_completed(self, exchange: HttpExchange) -> None:
        if exchange is self._running:
            if not exchange.keep_alive:
                self.close_after_response(exchange)
            self._serve_next(exchange)

    def exchange_failed(self, exchange: HttpExchange) -> None:
        if exchange is self._running:
            self._close()  # tells the client that the response is incomplete

    def on_response_complete(self) -> None:
        running = self._running
        if isinstance(running, RequestResponseCycle):
            self._unlink_cycle(running)
        self._serve_next(running)

    def _serve_next(self, ended: HttpExchange | RequestResponseCycle | None) -> None:
        """Start the next pipelined request, or wait for one."""
        flow = self.flow
        if self.transport.is_closing():
            return
        if self.expect_100_continue and ended is not None and ended.more_body:
            # It was sent no 100: its next bytes may be the body or a new request.
            self._close()
            return
        if flow.read_paused:
            flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self._phase is IDLE:
            self._deadline.expect(self._idle_s)
        elif self._deadline.due == inf:
            self._deadline.expect(self.bounds.header_timeout_s)

    def _unlink_cycle(self, cycle: RequestResponseCycle) -> None:
        """Break the reference cycle between a uvicorn cycle and its transport.

        Both are freed at their last use then, not by a late run of the garbage collector.
        """
        cycle.body = bytearray()  # it is read no more, and the connection may idle
        cycle.transport = self.transport

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_stall_timer(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _start_stall_timer(self, unread: int) -> None:
        after = self.bounds.stall_s + STALL_SLACK_S
        self._stall_timer = self.loop.call_later(after, self._on_stall, unread)

    def _on_stall(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread < before:
            self._start_stall_timer(unread)
        else:
            self.transport.abort()

    def finish(self) -> None:
        """Serve the requests that have begun and those on the way, then close. See `finishing`.

        A response whose headers are yet to be sent announces the end. A client that has been told
        otherwise may already send the next request, so its connection stays for LAST_IDLE_S.
        """
        self._idle_s = LAST_IDLE_S
        self.loop.call_later(LAST_IDLE_S, self._close_if_silent)
        last: HttpExchange | RequestResponseCycle | None = None
        if self.pipeline:
            last = self.pipeline[0][0]
        elif self._busy:
            last = self._running
        if isinstance(last, HttpExchange):
            last.keep_alive = last.keep_alive and last.started
        elif last is not None:
            last.keep_alive = last.keep_alive and last.response_started

    def _close_if_silent(self) -> None:
        if self._silent and not self._discarding and not self.transport.is_closing():
            self._close()

    @property
    def _silent(self) -> bool:
        """True if the client has sent nothing since the last response, or since it connected."""
        received = self._head_bytes + self._first_piece_bytes
        return received == 0 and self._phase is not BODY and not self._busy

    def close_after_response(self, cycle: HttpExchange | RequestResponseCycle) -> None:
        """Close the connection when the client has read the response, or fails to in time."""
        if cycle.response_complete and cycle.more_body:
            # It may read the response only after sending its body; the body's deadline stays.
            self._discard_input()
            self._end_output()
            return
        self._close()

    def _end_output(self) -> None:
        if self.transport.can_write_eof():  # TLS has no such end
            self.transport.write_eof()

    def _close(self) -> None:
        self.transport.close()
        if self.transport.get_write_buffer_size():
            # The time that the client has to read what was sent.
            self._deadline.replace(self.timeout_keep_alive, self.transport.abort)
        else:
            self._deadline.due = inf

    # Refusals

    def _refuse_connection(self, reason: str) -> None:
        self.connections.discard(self)  # it does not count while it lingers
        self._refuse(TooManyConnections(reason))

    def _discard_input(self) -> None:
        """Keep reading, to notice a disconnect, but drop whatever the client sends."""
        self._discarding = True
        self.flow.discard()

    def _on_expiry(self) -> None:
        """Close or refuse: the client has not sent what was awaited."""
        answered = self._phase is BODY and not self._busy
        silent = self._silent
        if silent and self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait until the client reads its last response
        elif answered or silent:
            self._close()  # there is nothing to refuse
        else:
            self._refuse(RequestTimeout("the request was not complete in time"))

    def _refuse(self, error: GatewayError) -> None:
        """Answer a request with an error from the connection itself, and close."""
        self._discard_input()
        self._deadline.due = inf
        if self.transport.is_closing():
            return
        running = self._running if self._busy else None
        if running is not None and not running.more_body:
            # The fault follows a valid request, whose response is completed first.
            running.keep_alive = False
            return
        if running is None and self._phase is BODY:
            self._close()  # it has been answered
            return
        if isinstance(running, HttpExchange):
            if running.started:
                running.disconnect()
                self._close()
                return
            if running.task is None:  # pipelined, and not started yet
                self._running = None
                self.on_refusal(error)
            running.refused_status = error.status
            running.disconnect()
        elif running is not None:
            running.disconnected = True  # nothing else reports it before the client is gone
            running.message_event.set()
            if running.response_started:
                self._close()
                return
            cast(dict[str, Any], running.scope)[REFUSED] = error.status
        else:
            self.on_refusal(error)
        self.transport.write(error_response(error))
        self._end_output()
        self._deadline.replace(LINGER_S, self.transport.abort)
