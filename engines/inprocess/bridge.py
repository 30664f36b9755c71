"""Sends requests to an ASGI application in this process as an HTTP client does to a server.

Chunks are passed from the application's `send` to the reader's sink without an asyncio task switch;
`send` waits only when the reader is behind (backpressure). Closing a response is what a lost
connection is to a server: the application reads `http.disconnect` (ASGI 3.0, HTTP spec 2.3), by
which vLLM aborts generation. An application that does not end soon after that is canceled.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

from engines.base import (
    EngineDied,
    EngineError,
    EngineNotReady,
    EngineProtocolError,
    EngineRequest,
    FirstByteTimeout,
    StallTimeout,
)
from engines.http import ResponseBody
from engines.spec import Timeouts
from engines.timing import MovingDeadline

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# Seconds that an application has to clean up after a disconnect before it is canceled.
DISCONNECT_S = 1.0
# Seconds that a canceled application has to end before it is abandoned.
CLOSE_S = 5.0


class _Exchange(MovingDeadline):
    """One request to the application, and the source of its response."""

    def __init__(self, bridge: "Bridge", request: EngineRequest) -> None:
        super().__init__(asyncio.get_running_loop())
        self._bridge = bridge
        self._response = ResponseBody(self, self._loop)
        # Set only while the head is awaited.
        self._head: asyncio.Future[ResponseBody] | None = self._loop.create_future()
        self._body: bytes | None = request.body  # None once the application has read it
        self._over = False
        self._gone = asyncio.Event()
        # Set only while the application waits for a reader that is behind.
        self._behind: asyncio.Event | None = None
        self._last_byte = 0.0
        self._head_due = self._loop.time() + bridge.timeouts.first_byte_s
        self._set_timer(self._head_due)
        self._reaper: asyncio.TimerHandle | None = None
        self.task = self._loop.create_task(self._run(_scope(request)), name="engine request")
        self.task.add_done_callback(self._on_done)

    async def wait_for_head(self) -> ResponseBody:
        """Return the response when its head is here. Raises EngineError."""
        assert self._head is not None
        try:
            return await self._head
        except asyncio.CancelledError:
            self.abort()
            raise

    def fail(self, error: EngineError) -> None:
        """End with an error for the reader; does nothing once the response is complete."""
        if self._over:
            return
        head = self._head
        self._end()
        self._dismiss()
        if head is None:
            self._response.fail(error)
        elif not head.done():
            head.set_exception(error)

    # The `ResponseSource` of the response

    def abort(self) -> None:
        if not self._over:
            self._end()
            self._dismiss()

    def resume(self) -> None:
        if self._behind is not None:
            self._behind.set()

    # The ASGI side

    async def _run(self, scope: Message) -> None:
        try:
            await self._bridge.app(scope, self._receive, self._send)
        except Exception as error:
            # Starlette raises an error again after it has responded with 500.
            if not self._over:
                log.exception("%s: unhandled exception in its application", self._bridge.address)
            self.fail(EngineDied(f"{self._bridge.address} failed: {type(error).__name__}"))
        finally:
            self.fail(EngineDied(f"{self._bridge.address} ended in the middle of a response"))

    async def _receive(self) -> Message:
        if self._body is not None and not self._over:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._over:
            return  # as a server does after its client has disconnected
        if self._bridge.dead():
            # This message reports its own death; a server would have closed the connection.
            self.fail(EngineDied(f"{self._bridge.address} died"))
            return
        self._last_byte = self._loop.time()
        match message["type"]:
            case "http.response.body" if self._head is None:
                await self._feed(message.get("body", b""), message.get("more_body", False))
            case "http.response.start" if not 200 <= message["status"] <= 599:
                fault = f"{self._bridge.address} sent the status {message['status']}"
                self.fail(EngineProtocolError(fault))
            case "http.response.start" if self._head is not None:
                head, self._head = self._head, None
                self._response.status = message["status"]
                self._set_timer(self._due())
                self._response.headers += [(n.lower(), v) for n, v in message.get("headers", ())]
                if not head.done():
                    head.set_result(self._response)
            case other:
                fault = f"{self._bridge.address} sent {other} out of turn"
                self.fail(EngineProtocolError(fault))

    async def _feed(self, data: bytes, more: bool) -> None:
        within = not data or self._response.feed(bytes(data), not more)
        if not more:
            # The sink may have closed the response while it took the last piece.
            if not self._over:
                self._end()
                self._response.finish()
        elif not within and not self._over:
            self._behind = asyncio.Event()
            await self._behind.wait()
            self._behind = None
            self._last_byte = self._loop.time()

    # The end

    def _end(self) -> None:
        self._over = True
        self._head = self._body = None
        self._cancel_timer()
        self._gone.set()
        self.resume()
        self._bridge.discard(self)

    def _dismiss(self) -> None:
        """Have the application canceled if it does not end by itself after the disconnect."""
        if not self.task.done():
            self._reaper = self._loop.call_later(DISCONNECT_S, self.task.cancel)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._bridge.discard_running(self)
        if self._reaper is not None:
            self._reaper.cancel()
        if task.cancelled():  # before its first step `_run` cannot report it
            self.fail(EngineDied(f"{self._bridge.address} was ended"))

    # `MovingDeadline`

    def _due(self) -> float:
        if self._head is not None:
            return self._head_due
        behind = self._behind is not None
        return (self._loop.time() if behind else self._last_byte) + self._bridge.timeouts.stall_s

    def _expire(self) -> None:
        timeouts = self._bridge.timeouts
        if self._head is not None:
            after = timeouts.first_byte_s
            self.fail(FirstByteTimeout(f"{self._bridge.address} did not respond in {after:g} s"))
        else:
            after = timeouts.stall_s
            self.fail(StallTimeout(f"{self._bridge.address} sent nothing for {after:g} s"))


class Bridge:
    """A client of one ASGI application. Use it within one event loop; `close()` it at the end."""

    def __init__(
        self, address: str, app: App, timeouts: Timeouts, dead: Callable[[], bool]
    ) -> None:
        """`address` is for errors; `dead` returns whether the engine behind `app` has died."""
        self.address = address
        self.app = app
        self.timeouts = timeouts
        self.dead = dead
        self._closed = False
        # Exchanges whose response is not complete.
        self._exchanges: set[_Exchange] = set()
        # Exchanges whose application still runs, if only to clean up.
        self._running: set[_Exchange] = set()
        self._quiet: asyncio.Event | None = None  # set only while a caller waits for it

    async def send(self, request: EngineRequest) -> ResponseBody:
        """Send a request; return the response when its head is here. Raises EngineError."""
        if self._closed or self.dead():
            raise EngineNotReady(f"{self.address} has ended")
        exchange = _Exchange(self, request)
        self._exchanges.add(exchange)
        self._running.add(exchange)
        return await exchange.wait_for_head()

    @property
    def in_flight(self) -> int:
        """The number of responses that are not complete."""
        return len(self._exchanges)

    async def quiet(self) -> None:
        """Return when no request is in flight."""
        if self._exchanges:
            self._quiet = self._quiet or asyncio.Event()
            await self._quiet.wait()

    async def close(self) -> None:
        """Fail every request with EngineDied; return when the application has ended for all."""
        self._closed = True
        for exchange in tuple(self._exchanges):
            exchange.fail(EngineDied(f"{self.address} has ended"))
        left = {exchange.task for exchange in self._running}
        if left:
            _, left = await asyncio.wait(left, timeout=DISCONNECT_S)
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=CLOSE_S)
        if left:
            log.error("%s: %d requests cannot be canceled", self.address, len(left))

    def discard(self, exchange: _Exchange) -> None:
        """Remove an exchange whose response is complete or has failed."""
        self._exchanges.discard(exchange)
        if not self._exchanges and self._quiet is not None:
            self._quiet.set()
            self._quiet = None

    def discard_running(self, exchange: _Exchange) -> None:
        """Remove an exchange whose application has ended."""
        self._running.discard(exchange)


def _scope(request: EngineRequest) -> Message:
    """Return the ASGI scope that a server would create for a request."""
    raw_path, _, query = request.target.partition("?")
    length = [(b"content-length", b"%d" % len(request.body))]
    has_body = request.body or request.method == "POST"
    return {
        "type": "http",
        # From 2.4 on Starlette notices a disconnect only when it sends the next chunk.
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(raw_path),
        "raw_path": raw_path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [(b"host", b"engine"), *request.headers, *(length if has_body else ())],
        "client": None,
        "server": None,
    }
