"""A request of the data plane and its response, on an HTTP/1.1 connection.

The request's headers are complete when it is created; its body is taken whole if it has arrived,
else read in pieces. The response is sent whole, or as headers and pieces; `push` sends a piece
without waiting, straight from the engine's socket to the client's. The framing of a response
(content-length, chunks, or the connection's end for HTTP/1.0) is decided only here.
"""

import asyncio
import inspect
from collections.abc import Coroutine
from time import perf_counter
from typing import Any, Protocol, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from app.asgi import (
    BUFFERED_BYTES,
    AnswerCopy,
    ClientDisconnected,
    ClientStalled,
    ExchangeHandler,
    Headers,
)
from app.errors import Dialect, GatewayError, dialect_of
from app.head_facts import HeadFacts
from app.server.connection.input_buffer import InputBuffer
from app.telemetry.logs import new_id, request_id

_header_line = b"%b: %b\r\n".__mod__
_CHUNK = b"%x\r\n%b\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Statuses whose responses have no body (RFC 9110, sections 6.4.1 and 15.3.6).
_BODILESS = (204, 205, 304)


class Connection(Protocol):
    """The part of a client connection that an exchange uses."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: InputBuffer
    tasks: set[asyncio.Task[None]]
    server_state: ServerState  # has the headers of every response

    def peer_of(self, headers: Headers) -> str:
        """Return the address of the client that has sent a request with these headers."""

    def exchange_completed(self, exchange: "HttpExchange") -> None:
        """Called when the last byte of the response has been written."""

    def exchange_failed(self, exchange: "HttpExchange") -> None:
        """Called when the task of an exchange has ended without a whole response."""


class HttpExchange:
    """A `ClientExchange`, which describes its methods, on an HTTP/1.1 connection."""

    # Class attributes: values that most requests never change.
    stall_s = 60.0
    rate_lines = b""
    model_line = b""
    extra_headers: Headers = ()
    answer_copy: AnswerCopy | None = None
    started = False
    status = 0
    bytes_out = 0  # without framing
    comment_bytes = 0
    client_wait_s = 0.0
    streaming = False
    response_complete = False  # uvicorn's cycles have this name too
    takes_chunks = False
    # Set by the connection before the task starts.
    keep_alive = True
    version_1_0 = False
    expects_continue = False  # the client sends its body after a 100
    disconnected = False
    # The reason for which the connection or `cut` canceled the task; None: neither did.
    fault: ClientDisconnected | GatewayError | None = None
    refused_status: int | None = None
    task: asyncio.Task[None] | None = None  # while it runs
    _body_bytes = 0  # in `_body`
    _reader: asyncio.Future[None] | None = None  # while the task waits for the body
    _chunked = False
    # Response headers that wait, for one iteration of the event loop, for the first piece.
    _unsent_headers = b""
    _flush: asyncio.Handle | None = None
    # Tasks that wait for the client, its own and that of the keep-alive, and since when.
    _draining = 0
    _drain_began = 0.0
    # Pieces that were pushed and not written; None while the client keeps up.
    _unsent: list[bytes] | None = None

    def __init__(
        self,
        connection: Connection,
        handler: ExchangeHandler,
        method: str,
        path: str,
        query: bytes,
        headers: list[tuple[bytes, bytes]],
        facts: HeadFacts | None = None,
        body: bytes | None = None,
    ) -> None:
        """Names of `headers` are in lower case; `path` is unquoted.

        `facts` are of the headers; `body` is the whole body, if it has arrived with them.
        """
        self.handler = handler
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.facts = facts or HeadFacts()
        self.by_name = by_name = dict(headers)
        self.request_id = request_id(headers) if b"x-request-id" in by_name else new_id()
        # By perf_counter; for a pipelined request, the end of the previous response.
        self.received_at = perf_counter()
        self._connection = connection
        # Pieces of the body that have arrived and were not taken.
        self._body = [] if body is None else [body]
        self.more_body = body is None  # of the request

    # The request

    def header(self, name: bytes) -> bytes:
        return self.by_name.get(name, b"")

    @property
    def dialect(self) -> Dialect:
        return dialect_of(self.path)

    @property
    def peer(self) -> str:
        return self._connection.peer_of(self.headers)

    def take_body(self) -> bytes | None:
        return None if self.more_body or self.expects_continue else self._take()

    async def read_body(self) -> bytes:
        if self.expects_continue:
            self.expects_continue = False
            if not self._connection.transport.is_closing():
                self._connection.transport.write(_CONTINUE)
        if not self._body and self.more_body:
            self._connection.flow.resume_reading()
            self._reader = self._connection.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._take()

    def _take(self) -> bytes:
        data = b"".join(self._body)
        self._body.clear()
        self._body_bytes = 0
        if self._connection.flow.read_paused:
            self._connection.flow.resume_reading()
        return data

    # The response

    async def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        # Started before any wait, so that no keep-alive starts it.
        self.started, self.status, self.expects_continue = True, status, False
        if status in _BODILESS:
            headers, body = _bodiless(status, headers), b""
        else:
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        self.bytes_out = len(body)
        connection = self._connection
        if connection.flow.write_paused:
            await self._drained()
        if not self.disconnected:
            if self.answer_copy is not None:
                self.answer_copy.add(body)
            head = self._encode_headers(status, headers)
            connection.transport.write(head if self.method == "HEAD" else head + body)
        self._end()

    async def start_response(self, status: int, headers: Headers) -> None:
        self.started, self.status, self.expects_continue = True, status, False
        if self._connection.flow.write_paused:
            await self._drained()
        if status in _BODILESS:
            headers = _bodiless(status, headers)
        elif b"content-length" not in dict(headers) and self.method != "HEAD":
            if self.version_1_0:
                self.keep_alive = False  # the body ends with the connection
            else:
                self._chunked = True
                headers = [*headers, (b"transfer-encoding", b"chunked")]
        self._unsent_headers = self._encode_headers(status, headers)
        self._flush = self._connection.loop.call_soon(self._flush_headers)

    async def send_body(self, data: bytes, *, more: bool) -> None:
        if self._unsent is not None:
            await self.flush()
        if self._connection.flow.write_paused:
            await self._drained()
        self.bytes_out += len(data)
        self._write(data, last=not more)
        if not more:
            self._end()

    def push(self, data: bytes) -> bool:
        self.bytes_out += len(data)
        if self._unsent is not None:
            self._unsent.append(data)
            return False
        self._write(data)
        if self._connection.flow.write_paused:
            self._unsent, self.takes_chunks = [], False
            return False
        self.takes_chunks = self._chunked and self.answer_copy is None and not self.disconnected
        return True

    def push_chunk(self, chunk: bytes, size: int) -> None:
        connection = self._connection
        self.bytes_out += size
        connection.transport.write(chunk)
        if connection.flow.write_paused:
            self._unsent, self.takes_chunks = [], False

    @property
    def writable(self) -> bool:
        # `_unsent` is empty where no chunk has come since the client fell behind, to be flushed.
        return not self._unsent and not self._connection.flow.write_paused

    async def flush(self) -> None:
        while self._unsent is not None:
            if self._connection.flow.write_paused:
                await self._drained()
                continue  # a keep-alive waits too, and may have written meanwhile
            data = b"".join(self._unsent)
            self._unsent = None
            if data:
                self._write(data)
                if self._connection.flow.write_paused:
                    self._unsent = []

    def _encode_headers(self, status: int, headers: Headers) -> bytes:
        pieces = (
            STATUS_LINE[status],
            *map(_header_line, self._connection.server_state.default_headers),
            *map(_header_line, headers),
            *map(_header_line, self.extra_headers),
            self.rate_lines,
            self.model_line,
            b"x-request-id: ",
            self.request_id.encode(),
            b"\r\n\r\n" if self.keep_alive else b"\r\nconnection: close\r\n\r\n",
        )
        return b"".join(pieces)

    def _write(self, data: bytes, *, last: bool = False) -> None:
        """Write a framed piece of the body, preceded by the headers if those have not been sent."""
        if self.disconnected:
            return
        if self.answer_copy is not None:
            self.answer_copy.add(data)
        if self._chunked:
            data = _CHUNK % (len(data), data) if data else b""
            if last:
                data += _LAST_CHUNK
        elif self.method == "HEAD" or self.status in _BODILESS:
            data = b""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
            data, self._unsent_headers = self._unsent_headers + data, b""
        if data:
            self._connection.transport.write(data)

    def _flush_headers(self) -> None:
        """Send the headers alone: no piece came in the same iteration of the event loop."""
        head, self._unsent_headers = self._unsent_headers, b""
        self._flush = None  # it references this exchange
        if head and not self.disconnected and not self._connection.transport.is_closing():
            self._connection.transport.write(head)

    def _end(self) -> None:
        self.response_complete = True
        if self._body:
            self._body.clear()  # it is read no more, and the connection may idle
        self._connection.exchange_completed(self)

    async def _drained(self) -> None:
        if not self._draining:
            self._drain_began = perf_counter()
        self._draining += 1
        try:
            async with asyncio.timeout(self.stall_s):
                await self._connection.flow.drain()
        except TimeoutError:
            raise ClientStalled(f"the client read nothing for {self.stall_s:g} s") from None
        finally:
            self._draining -= 1
            if not self._draining:
                self.client_wait_s += perf_counter() - self._drain_began

    # Called by the connection, and by the key store's cut of a disabled key

    def feed_body(self, data: bytes) -> None:
        """Buffer a piece of the request's body; `wake_reader` resumes the task."""
        if not self.response_complete:
            self._body.append(data)
            self._body_bytes = size = self._body_bytes + len(data)
            if size > BUFFERED_BYTES:
                self._connection.flow.pause_reading()

    def wake_reader(self) -> None:
        """Resume the task if it waits for the body and some has arrived."""
        reader = self._reader
        if reader is not None and not reader.done() and (self._body or not self.more_body):
            reader.set_result(None)

    def disconnect(self) -> None:
        self.disconnected, self.takes_chunks = True, False
        self.cut(ClientDisconnected())

    def start(self) -> None:
        connection = self._connection
        task = self.task = connection.loop.create_task(self.handler(self))
        task.add_done_callback(self._task_ended)
        connection.tasks.add(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self.task = None
        connection = self._connection
        connection.tasks.discard(task)
        if not self.response_complete and not self.disconnected:
            connection.exchange_failed(self)

    def take_fault(self) -> ClientDisconnected | GatewayError | None:
        fault, self.fault = self.fault, None
        if fault is not None and self.task is not None:
            self.task.uncancel()
        return fault

    def cut(self, error: ClientDisconnected | GatewayError) -> None:
        if self.fault is None and not self.response_complete and self.task is not None:
            self.fault = error
            coroutine = cast(Coroutine[Any, Any, None], self.task.get_coro())
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                # A task that is canceled before its first step leaves no record of the request.
                self._connection.loop.call_soon(self.task.cancel)
            else:
                self.task.cancel()


def _bodiless(status: int, headers: Headers) -> Headers:
    """Return the headers of a response without a body; that of a 304 may tell what a 200 has."""
    if status == 304:
        return headers
    framing = (b"content-length", b"transfer-encoding")
    kept = [(name, value) for name, value in headers if name not in framing]
    return [*kept, (b"content-length", b"0")] if status == 205 else kept
