"""The HTTP/1.1 client of the data path: a connection pool for one engine over TCP, TLS or a socket.

Runs on the event loop with httptools as its parser. A connection carries one exchange at a time; it
returns to the pool only after a complete request and a complete response, and is aborted otherwise,
because an aborted connection is how vLLM learns that the client no longer waits for the tokens.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable

from engines.base import ConnectTimeout, EngineNotReady, EngineRequest
from engines.http.address import Address
from engines.http.connection import ClosedBeforeResponse, Http1Connection
from engines.http.response import ResponseBody
from engines.spec import Timeouts
from engines.timing import LOOP_GRACE_S

# uvicorn, which serves vLLM, closes idle connections after 5 s; close them before it does.
MAX_IDLE_S = 4.0
_encode_header = b"%b: %b\r\n".__mod__


class Http1Client:
    """A pool of connections to one engine. Use within one event loop; `close()` when done."""

    def __init__(
        self, address: Address, timeouts: Timeouts, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.timeouts = timeouts
        self.least_timeout_s = min(timeouts.first_byte_s, timeouts.stall_s)
        # Open connections without an exchange, the most recently used on the right.
        self._idle: deque[Http1Connection] = deque()
        self._open: set[Http1Connection] = set()  # idle or in an exchange
        # The loop's time; asyncio.get_running_loop would call getpid. Set by the first connection.
        self._time: Callable[[], float]
        self._became_idle: asyncio.Event | None = None  # set up by `wait_idle`
        self.direct_to(address, headers)

    def direct_to(
        self,
        address: Address,
        headers: tuple[tuple[str, str], ...] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Send requests to this address, with these headers; idle connections are closed.

        `tls` verifies an address with TLS; default: by the authorities of this machine.
        """
        self.address = address
        while self._idle:
            self._idle.popleft().abort()
        fixed = "".join(f"{name}: {value}\r\n" for name, value in headers)
        self._fixed_head = f"host: {address.host_header}\r\n{fixed}".encode("latin-1")
        self._tls = (tls or ssl.create_default_context()) if address.tls else None

    async def send(self, request: EngineRequest) -> ResponseBody:
        """Send a request; return the response when its headers are here.

        A pooled connection that turns out to be closed is replaced once by a new one, provided
        that no byte of a response arrived (RFC 9112, section 9.3.1). Raises EngineError.
        """
        head = self._encode_head(request)
        pooled = self._pop_idle()
        while True:
            connection = pooled or await self._connect()
            response = head_received = None
            try:
                response, head_received = connection.begin(head, request.body)
                await head_received
            except ClosedBeforeResponse:
                if pooled is None:
                    raise
                pooled = None
            except asyncio.CancelledError:
                if response is not None:
                    response.close()  # aborts the exchange, unless it is complete
                raise
            else:
                return response
            finally:
                head_received = None  # an error in it refers to this frame

    def longest_wait_s(self, now: float) -> float:
        """Return how long the exchange that waits longest has had no byte; 0.0 when none waits.

        An exchange that is paused because its client does not read does not count.
        """
        return max((connection.waiting_s(now) for connection in self._open), default=0.0)

    @property
    def in_flight(self) -> int:
        """Exchanges in flight, until the end of their response bodies."""
        return len(self._open) - len(self._idle)

    async def wait_idle(self) -> None:
        """Wait until no exchange is in flight."""
        if self.in_flight:
            self._became_idle = self._became_idle or asyncio.Event()
            await self._became_idle.wait()

    def close(self) -> None:
        """Close every connection; responses in flight fail with EngineDied."""
        self._idle.clear()
        for connection in tuple(self._open):
            connection.close()

    # What connections call; see `engines.http.connection.Pool`

    def release(self, connection: Http1Connection) -> None:
        self._idle.append(connection)
        if self._became_idle is not None:
            self._note_idle()

    def discard(self, connection: Http1Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._became_idle is not None:
            self._note_idle()

    def _note_idle(self) -> None:
        """Wake what waits until no exchange is in flight, if none is."""
        if self._became_idle is not None and not self.in_flight:
            self._became_idle.set()
            self._became_idle = None

    def _pop_idle(self) -> Http1Connection | None:
        """Return the connection that was used last, if any; it may have closed meanwhile."""
        idle = self._idle
        while idle:
            if idle[0].idle_since >= self._time() - MAX_IDLE_S:
                return idle.pop()
            idle.popleft().abort()
        return None

    async def _connect(self) -> Http1Connection:
        loop = asyncio.get_running_loop()
        self._time = loop.time
        address = self.address

        def expire() -> None:
            limit.reschedule(loop.time() + LOOP_GRACE_S)

        timer = loop.call_later(self.timeouts.connect_s, expire)
        try:
            async with asyncio.timeout(None) as limit:
                if address.uds is not None:
                    _, connection = await loop.create_unix_connection(
                        lambda: Http1Connection(self, loop), address.uds
                    )
                else:
                    _, connection = await loop.create_connection(
                        lambda: Http1Connection(self, loop), address.host, address.port
                    )
                    if self._tls is not None:
                        await connection.start_tls(self._tls, address.host)
        except TimeoutError:
            after = self.timeouts.connect_s
            raise ConnectTimeout(f"{address} did not accept a connection in {after:g} s") from None
        except OSError as error:  # ssl.SSLError and socket.gaierror are OSErrors
            reason = error.strerror or str(error)
            raise EngineNotReady(f"cannot connect to {address}: {reason}") from None
        except UnicodeError:  # an empty label, or one over 63 characters
            raise EngineNotReady(f"cannot connect to {address}: no host name") from None
        finally:
            timer.cancel()
        self._open.add(connection)
        return connection

    def _encode_head(self, request: EngineRequest) -> bytes:
        method = request.method
        end = b"\r\n"
        if request.body or method == "POST":
            end = b"content-length: %d\r\n\r\n" % len(request.body)
        first = f"{method} {self.address.prefix}{request.target} HTTP/1.1\r\n".encode("latin-1")
        return b"".join((first, self._fixed_head, *map(_encode_header, request.headers), end))
