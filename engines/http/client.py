"""The data path's HTTP/1.1 client: httptools on the running loop, over TCP, TLS or a Unix socket.

One `Http1Client` per engine keeps its own pool. A connection carries one exchange at a time; it
goes back to the pool only after a whole request and a whole answer, and is aborted after anything
else, because an aborted connection is how vLLM learns that nobody waits for the tokens any more.
"""

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from engines.base import (
    ConnectTimeout,
    EngineDied,
    EngineError,
    EngineNotReady,
    EngineProtocolError,
    EngineRequest,
    FirstByteTimeout,
    StallTimeout,
)
from engines.http.immediate_future import ImmediateFuture
from engines.http.response import ResponseBody
from engines.spec import Timeouts
from engines.timing import ONE_TURN_S

# nginx gives a response head 4 or 8 KiB by default, Go's client 10 MiB; vLLM's is below 1 KiB.
MAX_HEAD_BYTES = 64 * 1024
# uvicorn, which vLLM serves with, closes idle connections after 5 s; leave before it does.
IDLE_S = 4.0
_line = b"%b: %b\r\n".__mod__  # of a header


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens: a host and port, or a Unix socket."""

    host: str = "engine"
    port: int = 80
    tls: bool = False
    prefix: str = ""
    uds: str | None = None

    @classmethod
    def from_url(cls, url: str) -> "Address":
        """Return the address of an http:// or https:// URL; its path becomes the prefix."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname or "", port, tls, parts.path.rstrip("/"))

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return self.uds or f"{self.host}:{self.port}"


class _ClosedBeforeAnswer(EngineDied):
    """The connection ended before one byte of the answer: a stale one may be replaced."""

    reason = "ClosedBeforeAnswer"


# What this client returns.
Http1Response = ResponseBody


class _Connection(asyncio.Protocol):
    """One connection and the parser of its answers. At most one exchange at a time."""

    def __init__(self, client: "Http1Client", loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        # Below TLS, whose transport does not count what waits here.
        self._tcp: asyncio.Transport | None = None
        # Pieces of a body since the last read of the socket; the parser appends to it itself.
        self._body: list[bytes] = []
        self.on_body = self._body.append
        self._parser = httptools.HttpResponseParser(self)
        self._response: Http1Response | None = None
        # There while the head is awaited, and no longer: the next exchange sets its own.
        self._head: ImmediateFuture[Http1Response] | None = None
        # There between the end of a head and the end of the piece that brought it.
        self._arrived: ImmediateFuture[Http1Response] | None = None
        self._answered = False
        # Of the head that is awaited; None after it, when what comes would be trailers.
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._trailer_bytes = 0
        self._received = 0  # bytes of the piece that is being parsed
        # Received since the last piece of a body: a head, trailers, extensions of chunks.
        self._idle_bytes = 0
        self._message_complete = False
        self._keep_alive = False
        self._until_close = False
        self._paused = False
        # It outlives an exchange and is moved when it fires: a request costs no timer of its own.
        # Invariant: it fires no later than an exchange under way may have to end.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._head_due = 0.0
        self._last_byte = 0.0
        self.idle_since = 0.0

    # The exchange

    async def exchange(self, payload: bytes, body: bytes) -> Http1Response:
        """Send one request; return its answer when the head has arrived. Raises EngineError."""
        transport, client, loop = self._transport, self._client, self._loop
        if transport is None or transport.is_closing():
            raise _ClosedBeforeAnswer(f"{client.address} closed the connection")
        response = Http1Response(self, loop)
        self._response = response
        client.in_flight += 1
        head: ImmediateFuture[Http1Response] = ImmediateFuture(loop)
        self._head = head
        self._headers = response.headers
        self._idle_bytes = self._trailer_bytes = 0
        self._answered = self._message_complete = self._until_close = False
        timeouts = client.timeouts
        now = loop.time()
        self._head_due = now + timeouts.first_byte_s
        # The first of the two that may be over; when it fires it looks what is left of which.
        first = now + min(timeouts.first_byte_s, timeouts.stall_s)
        if self._timer is None or first < self._timer_due:
            self._set_timer(first)
        if body:
            transport.writelines((payload, body))
        else:
            transport.write(payload)
        try:
            return await head
        except asyncio.CancelledError:
            # By now the answer may be whole and the connection busy with somebody else's request.
            if self._response is response:
                self.abort()
            raise

    def abort(self) -> None:
        """Close now, without a goodbye; safe to call at any time."""
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def give_up(self) -> None:
        """Close now, and tell whoever waits for an answer."""
        self._fail(EngineDied(f"the connection to {self._client.address} was given up"))

    def resume(self) -> None:
        """Read the socket again after the buffer was emptied."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._last_byte = self._loop.time()
            self._transport.resume_reading()

    def loop_time(self) -> float:
        """Return the loop's time, without a look for the running loop: that asks for the pid."""
        return self._loop.time()

    def silence_s(self, now: float) -> float:
        """Return for how long the engine has owed a byte; 0.0 when it owes none."""
        if self._response is None or self._paused:
            return 0.0
        asked = self._head_due - self._client.timeouts.first_byte_s
        return now - max(asked, self._last_byte)

    @property
    def _reusable(self) -> bool:
        """Whether another exchange may follow: the connection is open and its request is sent.

        An answer that came before the whole request was sent leaves the rest in the way.
        """
        transport, tcp = self._transport, self._tcp
        return (
            transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
            and (tcp is None or not tcp.get_write_buffer_size())
        )

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

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            # Bytes that no request asked for: the next answer could be taken for another's.
            self._client.forget(self)
            self.abort()
            return
        self._answered = True
        self._last_byte = self._loop.time()
        self._received = len(data)
        broken: EngineProtocolError | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # What one of our callbacks refused stands behind the parser's own error.
            reason = error.__context__ or error
            broken = EngineProtocolError(f"{self._client.address} broke HTTP/1.1: {reason}")
        self._idle_bytes += self._received
        if body := self._body:
            self._idle_bytes = 0
            data = body[0] if len(body) == 1 else b"".join(body)
            body.clear()
            whole = self._message_complete
            if not response.feed(data, whole) and not whole and not self._paused:
                assert self._transport is not None
                self._paused = True
                self._transport.pause_reading()
        if broken is None and self._idle_bytes > MAX_HEAD_BYTES:
            fault = f"over {MAX_HEAD_BYTES} bytes of headers, trailers or chunk extensions"
            broken = EngineProtocolError(f"{self._client.address} sent {fault}")
        head, self._arrived = self._arrived, None
        if broken is not None:
            self._fail(broken)
        elif self._message_complete:
            self._finish(reusable=self._keep_alive)
        if head is not None:
            # Last, for it runs what waits, which then finds all that came with the head.
            head.complete(response)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._tcp = None
        self._client.forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._response is None:
            return
        if self._until_close and self._head is None and exc is None:
            self._finish(reusable=False)
        elif not self._answered:
            self._fail(_ClosedBeforeAnswer(f"{self._client.address} closed without an answer"))
        else:
            self._fail(EngineDied(f"{self._client.address} closed in the middle of an answer"))

    # httptools callbacks. An exception raised in one becomes an HttpParserCallbackError.

    def on_message_begin(self) -> None:
        if self._message_complete:
            raise ValueError("bytes after the end of the answer")

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
        response, head = self._response, self._head
        if response is None or head is None:
            raise ValueError("an answer that nobody asked for")
        status = self._parser.get_status_code()
        if not 100 <= status <= 599:
            raise ValueError(f"the status {status}")
        by_name = dict(response.headers)
        coded = b"transfer-encoding" in by_name
        if coded:
            # The parser takes off the last coding only, and clients do not get the header.
            codings = [v for n, v in response.headers if n == b"transfer-encoding"]
            if len(codings) > 1 or codings[0].strip().lower() != b"chunked":
                raise ValueError("a transfer coding other than chunked")
        if (
            self._idle_bytes + self._received > MAX_HEAD_BYTES
            and sum(len(n) + len(v) for n, v in response.headers) > MAX_HEAD_BYTES
        ):
            raise ValueError(f"the head of the answer is over {MAX_HEAD_BYTES} bytes")
        if status < 200:
            if status == 101:
                raise ValueError("an upgrade that nobody asked for")
            response.headers.clear()  # 1xx: the real answer follows
            return
        response.status = status
        framed = coded or b"content-length" in by_name
        self._until_close = not framed and status not in (204, 304)
        self._head, self._arrived = None, head
        self._headers = None

    def on_message_complete(self) -> None:
        if self._response is not None and self._response.status >= 200:
            self._message_complete = True
            self._keep_alive = self._parser.should_keep_alive()

    # The end of an exchange

    def _finish(self, *, reusable: bool) -> None:
        response = self._end()
        if reusable and self._reusable:
            if self._paused:
                self.resume()
            self.idle_since = self._last_byte
            self._client.release(self)
        elif self._transport is not None:
            self._transport.abort()
        if response is not None:
            response.finish()  # last, for it runs what waits

    def _fail(self, error: EngineError) -> None:
        head = self._head
        response = self._end()
        if self._transport is not None:
            self._transport.abort()
        if head is not None:
            head.fail(error)
        elif response is not None:
            response.fail(error)

    def _end(self) -> Http1Response | None:
        """End the exchange, if there is one; return its answer."""
        response, self._response = self._response, None
        self._head = self._headers = None
        if response is not None:
            client = self._client
            client.in_flight -= 1
            if not client.in_flight:
                client.fell_quiet()
        return response

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._response is None:
            return  # the next exchange sets it again
        due = self._due()
        if due > self._loop.time():
            self._set_timer(due)
        else:
            self._timer_due = due
            self._timer = self._loop.call_later(ONE_TURN_S, self._on_expiry)

    def _on_expiry(self) -> None:
        self._timer = None
        if self._response is None:
            return
        if (due := self._due()) > self._loop.time():
            self._set_timer(due)
        elif self._head is not None:
            after = self._client.timeouts.first_byte_s
            self._fail(FirstByteTimeout(f"{self._client.address} gave no answer in {after:g} s"))
        else:
            after = self._client.timeouts.stall_s
            self._fail(StallTimeout(f"{self._client.address} sent nothing for {after:g} s"))

    def _due(self) -> float:
        """Return the loop's time until which the engine may be silent."""
        if self._head is not None:
            return self._head_due
        stall_s = self._client.timeouts.stall_s
        return (self._loop.time() if self._paused else self._last_byte) + stall_s


class Http1Client:
    """The connections to one engine. Use within one event loop; `close()` when done."""

    def __init__(
        self, address: Address, timeouts: Timeouts, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.address = address
        self.timeouts = timeouts
        # Open connections that carry no exchange, the one used last at the right.
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()  # those in `_idle` and those in an exchange
        # How many exchanges are under way, their bodies included.
        self.in_flight = 0
        self._quiet: asyncio.Event | None = None  # there while somebody waits for it
        fixed = "".join(f"{name}: {value}\r\n" for name, value in headers)
        self._fixed_head = f"host: {address.host_header}\r\n{fixed}".encode("latin-1")
        self._tls = ssl.create_default_context() if address.tls else None

    async def send(self, request: EngineRequest) -> Http1Response:
        """Send a request; return the answer when its head is here.

        A pooled connection that turns out to be closed is replaced once by a fresh one, provided
        that not one byte of an answer came (RFC 9112, section 9.3.1). Raises EngineError.
        """
        head = self._head(request)
        pooled = self._take()
        if pooled is not None:
            try:
                return await pooled.exchange(head, request.body)
            except _ClosedBeforeAnswer:
                pass
        fresh = await self._connect()
        return await fresh.exchange(head, request.body)

    def silence_s(self, now: float) -> float:
        """Return for how long the exchange that waits longest has had no byte; 0.0: none waits.

        A client that does not read what has come is not waited for.
        """
        return max((connection.silence_s(now) for connection in self._open), default=0.0)

    async def quiet(self) -> None:
        """Return when no exchange is under way."""
        if self.in_flight:
            self._quiet = self._quiet or asyncio.Event()
            await self._quiet.wait()

    def close(self) -> None:
        """Close every connection; an answer that is under way ends in EngineDied."""
        self._idle.clear()
        for connection in tuple(self._open):
            connection.give_up()

    def fell_quiet(self) -> None:
        """Take note that no exchange is under way any more."""
        if self._quiet is not None:
            self._quiet.set()
            self._quiet = None

    def release(self, connection: _Connection) -> None:
        """Take back a connection after a whole answer."""
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        """Drop a connection that has closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _take(self) -> _Connection | None:
        if not self._idle:
            return None
        idle = self._idle
        too_old = idle[0].loop_time() - IDLE_S
        while idle and idle[0].idle_since < too_old:
            idle.popleft().abort()
        # One that has closed meanwhile says so when it is used.
        return idle.pop() if idle else None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        address = self.address

        def expire() -> None:
            limit.reschedule(loop.time() + ONE_TURN_S)

        timer = loop.call_later(self.timeouts.connect_s, expire)
        try:
            async with asyncio.timeout(None) as limit:
                if address.uds is not None:
                    _, connection = await loop.create_unix_connection(
                        lambda: _Connection(self, loop), address.uds
                    )
                else:
                    _, connection = await loop.create_connection(
                        lambda: _Connection(self, loop), address.host, address.port
                    )
                    if self._tls is not None:
                        await connection.start_tls(self._tls, address.host)
        except TimeoutError:
            after = self.timeouts.connect_s
            raise ConnectTimeout(f"{address} did not accept a connection in {after:g} s") from None
        except OSError as error:  # ssl.SSLError and socket.gaierror are OSErrors
            reason = error.strerror or str(error)
            raise EngineNotReady(f"cannot connect to {address}: {reason}") from None
        finally:
            timer.cancel()
        self._open.add(connection)
        return connection

    def _head(self, request: EngineRequest) -> bytes:
        target = f"{request.method} {self.address.prefix}{request.target} HTTP/1.1\r\n"
        lines = [target.encode("latin-1"), self._fixed_head]
        lines += map(_line, request.headers)
        if request.body or request.method == "POST":
            lines.append(b"content-length: %d\r\n\r\n" % len(request.body))
        else:
            lines.append(b"\r\n")
        return b"".join(lines)
