"""One request of the data plane and its response: what the relay sees of a client connection.

The request's head is here from the beginning; the body is taken whole where it has arrived, else
read piece by piece. The response leaves whole, or as a head and pieces; `push` sends a piece
without waiting, straight from the engine's socket to the client's. How a response is framed
(length, chunks, or the connection's end for HTTP/1.0) is decided here and nowhere else.
"""

import asyncio
import inspect
from collections.abc import Coroutine
from time import perf_counter
from typing import Any, Protocol, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from app.asgi import BUFFERED_BYTES, ClientDisconnected, ClientStalled, ExchangeHandler, Headers
from app.errors import Dialect, GatewayError, dialect_of
from app.server.connection.input_buffer import InputBuffer
from app.telemetry.logs import new_id, request_id

# The lines before chunks of the usual sizes; formatting one takes longer than looking it up.
_SIZES = tuple(b"%x\r\n" % size for size in range(4096))
_line = b"%b: %b\r\n".__mod__  # of a header
_LAST_CHUNK = b"0\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Statuses whose responses have no body (RFC 9110, section 6.4.1).
_BODILESS = (204, 304)


class Carrier(Protocol):
    """What an exchange needs of its connection."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: InputBuffer

    @property
    def peer(self) -> str: ...

    def common_headers(self) -> Headers:
        """Return the headers that every response has."""
        ...

    def exchange_completed(self, exchange: "HttpExchange") -> None:
        """Take note that the last byte of the response has been written."""
        ...

    def exchange_ended(self, exchange: "HttpExchange", task: asyncio.Task[None]) -> None:
        """Take note that the task of an exchange has ended, whatever became of the response."""
        ...


class HttpExchange:
    """A `ClientExchange` on an HTTP/1.1 connection."""

    # What most requests never change stands in the class.

    # How long the client may leave unread what has been sent, in seconds.
    stall_s = 60.0
    # What every response says of the caller's limits, once it is known: lines of its head.
    rate_lines = b""
    # The line of its head that names the model which answered; empty where the gateway itself does.
    model_line = b""
    # What a response to a page of another origin says besides.
    extra_headers: Headers = ()
    started = False  # the head has left, or waits until the client has read what came before
    status = 0  # of the response, once it has begun
    bytes_out = 0  # of its body, without framing; also those that wait for a slow client
    streaming = False  # the head of an event stream has left
    response_complete = False  # the last byte has left; uvicorn's cycles have it by this name
    more_body = True  # of the request
    disconnected = False
    # Why the connection or a cut canceled the task; None: neither did.
    fault: ClientDisconnected | GatewayError | None = None
    # The status that the connection itself has sent, to a request whose body is faulty.
    refused_status: int | None = None
    task: asyncio.Task[None] | None = None  # while it runs
    _expects_continue = False
    _body_bytes = 0  # in `_body`
    _reader: asyncio.Future[None] | None = None  # while the task waits for the body
    _chunked = False
    # A head that waits, within a turn of the loop, for the first piece of its body.
    _head = b""
    _flush: asyncio.Handle | None = None
    # What was pushed and could not be written; None while the client takes everything.
    _unsent: list[bytes] | None = None

    def __init__(
        self,
        carrier: Carrier,
        handler: ExchangeHandler,
        method: str,
        path: str,
        query: bytes,
        headers: list[tuple[bytes, bytes]],
        *,
        version_1_0: bool = False,
        keep_alive: bool = True,
        expects_continue: bool = False,
    ) -> None:
        """Names of `headers` are in lower case; `path` is unquoted."""
        self.handler = handler
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.keep_alive = keep_alive
        self._by_name = by_name = dict(headers)
        self.request_id = request_id(headers) if b"x-request-id" in by_name else new_id()
        # By perf_counter; of a pipelined request, when the one before it has been answered.
        self.received_at = perf_counter()
        self._carrier = carrier
        self._version_1_0 = version_1_0
        if expects_continue and not version_1_0:
            self._expects_continue = True
        # What has arrived of the body and was not taken.
        self._body: list[bytes] = []

    # The request

    def header(self, name: bytes) -> bytes:
        """Return a header of the request, the last of several; empty if there is none."""
        return self._by_name.get(name, b"")

    @property
    def dialect(self) -> Dialect:
        """The dialect in which the client reads errors."""
        return dialect_of(self.path)

    @property
    def peer(self) -> str:
        """The address that the request came from; "" where there is none, as on a Unix socket."""
        return self._carrier.peer

    def take_body(self) -> bytes | None:
        """Return the whole body if it has arrived, and take it; None: it must be read."""
        if self.more_body or self._expects_continue:
            return None
        return self._take()

    async def read_body(self) -> bytes:
        """Return what has arrived of the body, waiting for the first of it; b"" at the end."""
        if self._expects_continue:
            self._expects_continue = False
            if not self._carrier.transport.is_closing():
                self._carrier.transport.write(_CONTINUE)
        if not self._body and self.more_body:
            self._carrier.flow.resume_reading()
            self._reader = self._carrier.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._take()

    def _take(self) -> bytes:
        pieces = self._body
        self._body = []
        self._body_bytes = 0
        if self._carrier.flow.read_paused:
            self._carrier.flow.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # The response

    async def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response, with its length. Raises ClientStalled."""
        self._begin(status)
        self.bytes_out += len(body)
        if self._carrier.flow.write_paused:
            await self._drained()
        if not _has_length(headers) and status not in _BODILESS:
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        if not self.disconnected:
            head = self._response_head(status, headers)
            self._carrier.transport.write(head if self.method == "HEAD" else head + body)
        self._end()

    async def start_response(self, status: int, headers: Headers) -> None:
        """Send the head of a response. Raises ClientStalled."""
        self._begin(status)
        if self._carrier.flow.write_paused:
            await self._drained()
        if not _has_length(headers) and status not in _BODILESS and self.method != "HEAD":
            if self._version_1_0:
                self.keep_alive = False  # the end of the connection is the end of the body
            else:
                self._chunked = True
                headers = [*headers, (b"transfer-encoding", b"chunked")]
        self._head = self._response_head(status, headers)
        self._flush = self._carrier.loop.call_soon(self._flush_head)

    async def send_body(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body, waiting for a slow client. Raises ClientStalled."""
        if self._unsent is not None:
            await self.flush()
        if self._carrier.flow.write_paused:
            await self._drained()
        self.bytes_out += len(data)
        self._write(data, last=not more)
        if not more:
            self._end()

    def push(self, data: bytes) -> bool:
        """Send a piece of the body without waiting; return whether the client takes more.

        After False, `flush` must be awaited; what is pushed before that waits for it too.
        """
        self.bytes_out += len(data)
        if self._unsent is not None:
            self._unsent.append(data)
            return False
        self._write(data)
        if self._carrier.flow.write_paused:
            self._unsent = []
            return False
        return True

    @property
    def writable(self) -> bool:
        """Whether all that was sent, here and before, has been written and more can be."""
        return self._unsent is None and not self._carrier.flow.write_paused

    async def flush(self) -> None:
        """Return when everything that was pushed has been written. Raises ClientStalled."""
        while self._unsent is not None:
            if self._carrier.flow.write_paused:
                await self._drained()
                continue  # a keep-alive waits as well, and may have written meanwhile
            data = b"".join(self._unsent)
            self._unsent = None
            if data:
                self._write(data)
                if self._carrier.flow.write_paused:
                    self._unsent = []

    def _begin(self, status: int) -> None:
        """Take the response on, before any wait: a keep-alive begins none then."""
        self.started = True
        self._expects_continue = False
        self.status = status

    def _response_head(self, status: int, headers: Headers) -> bytes:
        pieces = [STATUS_LINE[status]]
        pieces += map(_line, self._carrier.common_headers())
        pieces += map(_line, headers)
        if self.extra_headers:
            pieces += map(_line, self.extra_headers)
        name = self.request_id.encode()
        pieces += (self.rate_lines, self.model_line, b"x-request-id: ", name)
        pieces.append(b"\r\n\r\n" if self.keep_alive else b"\r\nconnection: close\r\n\r\n")
        return b"".join(pieces)

    def _write(self, data: bytes, *, last: bool = False) -> None:
        """Write a piece of the body in its frame, behind the head if that has not left."""
        if self.disconnected:
            return
        if self._chunked:
            size = len(data)
            line = _SIZES[size] if size < len(_SIZES) else b"%x\r\n" % size
            if not last:
                data = b"".join((line, data, b"\r\n")) if size else b""
            elif size:
                data = b"".join((line, data, b"\r\n", _LAST_CHUNK))
            else:
                data = _LAST_CHUNK
        elif self.method == "HEAD":
            data = b""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
            data, self._head = self._head + data, b""
        if data:
            self._carrier.transport.write(data)

    def _flush_head(self) -> None:
        """Send the head alone: nothing of the body came in the same turn."""
        head, self._head = self._head, b""
        self._flush = None  # it holds this exchange
        if head and not self.disconnected and not self._carrier.transport.is_closing():
            self._carrier.transport.write(head)

    def _end(self) -> None:
        self.response_complete = True
        self._body.clear()  # nothing reads it now, and the connection may idle
        self._carrier.exchange_completed(self)

    async def _drained(self) -> None:
        try:
            async with asyncio.timeout(self.stall_s):
                await self._carrier.flow.drain()
        except TimeoutError:
            raise ClientStalled(f"the client read nothing for {self.stall_s:g} s") from None

    # Called by the connection, and by the key store's cut of a disabled key

    def feed_body(self, data: bytes) -> None:
        """Take a piece of the request's body; the reader goes on with `wake_reader`."""
        if not self.response_complete:
            self._body.append(data)
            self._body_bytes += len(data)
            if self._body_bytes > BUFFERED_BYTES:
                self._carrier.flow.pause_reading()

    def wake_reader(self) -> None:
        """Resume the task if it waits for what of the body has arrived."""
        reader = self._reader
        if reader is not None and not reader.done() and (self._body or not self.more_body):
            reader.set_result(None)

    def cut(self, error: GatewayError) -> None:
        """End the request with an error; see `app.relay.in_flight.Abortable`."""
        self._interrupt(error)

    def disconnect(self) -> None:
        """Cancel the request: the client has disconnected."""
        self.disconnected = True
        self._interrupt(ClientDisconnected())

    def start(self) -> asyncio.Task[None]:
        """Start the task that handles the request."""
        loop = self._carrier.loop
        task = self.task = loop.create_task(self.handler(self))
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self.task = None
        self._carrier.exchange_ended(self, task)

    def take_fault(self) -> ClientDisconnected | GatewayError | None:
        """Return why the task was cancelled, once; it may then wait again."""
        fault, self.fault = self.fault, None
        if fault is not None and self.task is not None:
            self.task.uncancel()
        return fault

    def _interrupt(self, fault: ClientDisconnected | GatewayError) -> None:
        if self.fault is None and not self.response_complete and self.task is not None:
            self.fault = fault
            coroutine = cast(Coroutine[Any, Any, None], self.task.get_coro())
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                # A task that is canceled before its first step leaves no record of the request.
                self._carrier.loop.call_soon(self.task.cancel)
            else:
                self.task.cancel()


def _has_length(headers: Headers) -> bool:
    for name, _ in headers:  # noqa: SIM110 - a generator costs more than the loop
        if name == b"content-length":
            return True
    return False
