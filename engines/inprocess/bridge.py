"""Requests to an ASGI application in this process, answered like those to a server.

No task wakes for a chunk: what the application sends is handed to whoever pumps the answer from
inside its own `send`, which waits only when the reader is behind. Letting go of an answer is what a
server's lost connection is: the application reads `http.disconnect` (ASGI 3.0, HTTP spec 2.3), and
vLLM ends generation by that. One that does not end by itself soon is cancelled.
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
from engines.http.response import ResponseBody
from engines.spec import Timeouts

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# An application that was told that nobody listens has this long to clean up before it is cancelled.
DISCONNECT_S = 1.0
# And one that was cancelled has this long to go, before it is left behind.
CLOSE_S = 5.0
# A loop that was not scheduled for a while runs its late timers before it takes what the engine
# sent meanwhile; the application gets one more turn of the loop before it is blamed.
ONE_TURN_S = 0.01


class _Exchange:
    """One request on its way through the application; the source of its answer."""

    def __init__(self, bridge: "Bridge", request: EngineRequest) -> None:
        self._bridge = bridge
        self._loop = asyncio.get_running_loop()
        self._answer = ResponseBody(self, self._loop)
        # There while the head is awaited, and no longer.
        self._head: asyncio.Future[ResponseBody] | None = self._loop.create_future()
        self._body: bytes | None = request.body  # until the application has read it
        self._over = False
        self._gone = asyncio.Event()
        # There while the application waits for a reader that is behind.
        self._behind: asyncio.Event | None = None
        self._last_byte = 0.0
        patience = bridge.timeouts.first_byte_s
        self._head_due = self._loop.time() + patience
        self._timer = self._loop.call_later(patience, self._on_timer)
        self._reaper: asyncio.TimerHandle | None = None
        self.task = self._loop.create_task(self._run(_scope(request)), name="engine request")
        self.task.add_done_callback(self._on_done)

    async def answer(self) -> ResponseBody:
        """Return the answer when its head is here. Raises EngineError."""
        assert self._head is not None
        try:
            return await self._head
        except asyncio.CancelledError:
            self.abort()
            raise

    def fail(self, error: EngineError) -> None:
        """End now, and tell whoever waits for the answer; nothing if it is whole."""
        if self._over:
            return
        head = self._head
        self._end()
        self._dismiss()
        if head is None:
            self._answer.fail(error)
        elif not head.done():
            head.set_exception(error)

    # The answer's `Source`

    def abort(self) -> None:
        if not self._over:
            self._end()
            self._dismiss()

    def resume(self) -> None:
        if self._behind is not None:
            self._behind.set()

    # What the application sees

    async def _run(self, scope: Message) -> None:
        try:
            await self._bridge.app(scope, self._receive, self._send)
        except Exception as error:
            # Starlette raises an error again that it has answered with a 500 already.
            if not self._over:
                log.exception("%s: a fault of its application", self._bridge.address)
            self.fail(EngineDied(f"{self._bridge.address} broke off: {type(error).__name__}"))
        finally:
            self.fail(EngineDied(f"{self._bridge.address} ended in the middle of an answer"))

    async def _receive(self) -> Message:
        if self._body is not None and not self._over:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._over:
            return  # as a server does after its client has left
        if self._bridge.dead():
            # What it says now is about its own death; a server would have broken off.
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
                self._answer.status = message["status"]
                self._timer.cancel()
                self._timer = self._loop.call_later(self._bridge.timeouts.stall_s, self._on_timer)
                self._answer.headers += [(n.lower(), v) for n, v in message.get("headers", ())]
                if not head.done():
                    head.set_result(self._answer)
            case other:
                fault = f"{self._bridge.address} sent {other} out of turn"
                self.fail(EngineProtocolError(fault))

    async def _feed(self, data: bytes, more: bool) -> None:
        within = not data or self._answer.feed(bytes(data), not more)
        if not more:
            # The sink may have let go of the answer while it took the last piece.
            if not self._over:
                self._end()
                self._answer.finish()
        elif not within and not self._over:
            self._behind = asyncio.Event()
            await self._behind.wait()
            self._behind = None
            self._last_byte = self._loop.time()

    # The end

    def _end(self) -> None:
        self._over = True
        self._head = self._body = None
        self._timer.cancel()
        self._gone.set()
        self.resume()
        self._bridge.ended(self)

    def _dismiss(self) -> None:
        """See to it that the application ends, which has heard that nobody listens."""
        if not self.task.done():
            self._reaper = self._loop.call_later(DISCONNECT_S, self.task.cancel)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._bridge.left(self)
        if self._reaper is not None:
            self._reaper.cancel()
        if task.cancelled():  # before its first step, `_run` had no chance to tell
            self.fail(EngineDied(f"{self._bridge.address} was ended"))

    def _on_timer(self) -> None:
        # One timer per exchange, moved only when it fires: a chunk costs it one assignment.
        left = self._patience()
        if left <= 0:
            self._timer = self._loop.call_later(ONE_TURN_S, self._on_expiry)
        else:
            self._timer = self._loop.call_later(left, self._on_timer)

    def _on_expiry(self) -> None:
        timeouts = self._bridge.timeouts
        if (left := self._patience()) > 0:
            self._timer = self._loop.call_later(left, self._on_timer)
        elif self._head is not None:
            after = timeouts.first_byte_s
            self.fail(FirstByteTimeout(f"{self._bridge.address} gave no answer in {after:g} s"))
        else:
            after = timeouts.stall_s
            self.fail(StallTimeout(f"{self._bridge.address} sent nothing for {after:g} s"))

    def _patience(self) -> float:
        """Return for how many seconds more the application may be silent."""
        if self._head is not None:
            return self._head_due - self._loop.time()
        if self._behind is not None:
            return self._bridge.timeouts.stall_s
        return self._last_byte + self._bridge.timeouts.stall_s - self._loop.time()


class Bridge:
    """The way to one ASGI application. Use within one event loop; `close()` when done."""

    def __init__(
        self, address: str, app: App, timeouts: Timeouts, dead: Callable[[], bool]
    ) -> None:
        """`address` stands in errors; `dead` tells whether what computes behind `app` has died."""
        self.address = address
        self.app = app
        self.timeouts = timeouts
        self.dead = dead
        self._closed = False
        # Under way: their answers are not whole. The others only clean up after themselves.
        self._exchanges: set[_Exchange] = set()
        self._leaving: set[_Exchange] = set()
        self._quiet: asyncio.Event | None = None  # there while somebody waits for it

    async def send(self, request: EngineRequest) -> ResponseBody:
        """Send a request; return the answer when its head is here. Raises EngineError."""
        if self._closed or self.dead():
            raise EngineNotReady(f"{self.address} has ended")
        exchange = _Exchange(self, request)
        self._exchanges.add(exchange)
        self._leaving.add(exchange)
        return await exchange.answer()

    @property
    def in_flight(self) -> int:
        """How many answers are not whole yet."""
        return len(self._exchanges)

    async def quiet(self) -> None:
        """Return when no answer is under way."""
        if self._exchanges:
            self._quiet = self._quiet or asyncio.Event()
            await self._quiet.wait()

    async def close(self) -> None:
        """End every request in EngineDied; return when the application has let go of all."""
        self._closed = True
        for exchange in tuple(self._exchanges):
            exchange.fail(EngineDied(f"{self.address} has ended"))
        left = {exchange.task for exchange in self._leaving}
        if left:
            _, left = await asyncio.wait(left, timeout=DISCONNECT_S)
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=CLOSE_S)
        if left:
            log.error("%s: %d requests cannot be cancelled", self.address, len(left))

    def ended(self, exchange: _Exchange) -> None:
        """Note that an answer is whole or will never be."""
        self._exchanges.discard(exchange)
        if not self._exchanges and self._quiet is not None:
            self._quiet.set()
            self._quiet = None

    def left(self, exchange: _Exchange) -> None:
        """Note that the application is done with a request."""
        self._leaving.discard(exchange)


def _scope(request: EngineRequest) -> Message:
    """Return what a server would tell the application of a request."""
    raw_path, _, query = request.target.partition("?")
    length = [(b"content-length", b"%d" % len(request.body))]
    has_body = request.body or request.method == "POST"
    return {
        "type": "http",
        # From 2.4 on Starlette notices a client's leave only when it sends the next chunk.
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
