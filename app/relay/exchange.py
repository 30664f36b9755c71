"""The client's side of one request: its answer goes out here, waiting for the client or not."""

import asyncio
from collections.abc import Generator, Sequence
from typing import Any

from starlette.types import Message, Scope, Send

from app.errors import Dialect, GatewayError
from app.relay.sse import error_event
from app.telemetry.access import RequestRecord

Headers = Sequence[tuple[bytes, bytes]]


class ClientStalled(Exception):
    """The client reads nothing of what waits for it."""


class Exchange:
    """One request on its way: where its answer goes, and what is noted of it."""

    __slots__ = (
        "_backlog", "_rest", "_send", "_timeout_s", "complete", "dialect", "record", "scope",
        "started", "streaming",
    )  # fmt: skip

    def __init__(
        self, scope: Scope, send: Send, record: RequestRecord, dialect: Dialect, timeout_s: float
    ) -> None:
        self.scope = scope
        self.record = record
        self.dialect = dialect
        self.started = False  # the head has left
        self.streaming = False  # the head of an event stream has left
        self.complete = False  # the last byte has left
        self._send = send
        self._timeout_s = timeout_s
        # A `send` that was stepped until it had to wait for the client, and what is sent after it.
        # Nothing else may be sent while it is there.
        self._rest: _Rest | None = None
        self._backlog: list[Message] = []

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head of the answer. Raises ClientStalled."""
        if not self.push_start(status, headers):
            await self.settle()

    async def body(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the answer, and wait for a client that is slow. Raises ClientStalled."""
        if not self.push(data, more=more):
            await self.settle()

    def push_start(self, status: int, headers: Headers) -> bool:
        """Send the head of the answer without waiting; return whether the client takes more."""
        self.started = True
        self.record.status = status
        request_id = self.record.request_id.encode()
        return self._step(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, (b"x-request-id", request_id)],
            }
        )

    def push(self, data: bytes, *, more: bool) -> bool:
        """Send a piece without waiting, from a callback of the loop if need be.

        Returns whether the client takes more. After False, whoever can wait awaits `settle`.
        """
        self.record.bytes_out += len(data)
        self.complete = not more
        return self._step({"type": "http.response.body", "body": data, "more_body": more})

    @property
    def settled(self) -> bool:
        """Whether the client has taken everything that was pushed."""
        return self._rest is None

    async def settle(self) -> None:
        """Return when the client has taken what was pushed. Raises ClientStalled."""
        if self._rest is None:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._rest
                while self._backlog:
                    await self._send(self._backlog.pop(0))
        except TimeoutError:
            raise ClientStalled(f"the client read nothing for {self._timeout_s:g} s") from None
        self._rest = None

    async def fail(self, error: GatewayError) -> None:
        """Tell the client of a fault, as far as it still can be told.

        Before the head that is a whole answer; in a stream it is one more event, after which the
        stream stays unfinished, so that nobody takes it for whole. Else the connection just closes.
        """
        if self.complete:
            return
        if self.streaming:
            await self.body(error_event(error, self.dialect), more=True)
        elif not self.started:
            body = error.body(self.dialect)
            length = b"%d" % len(body)
            headers = [(b"content-type", b"application/json"), (b"content-length", length)]
            await self.start(error.status, headers + error.headers())
            await self.body(body, more=False)

    def _step(self, message: Message) -> bool:
        if self._rest is not None:
            self._backlog.append(message)
            return False
        steps = self._send(message).__await__()
        try:
            waiting = next(steps)
        except StopIteration:
            return True
        self._rest = _Rest(steps, waiting)
        return False


class _Rest:
    """What is left of an awaitable that was stepped by hand until it had to wait."""

    def __init__(self, steps: Generator[Any, None, Any], waiting: "asyncio.Future[Any]") -> None:
        self._steps = steps
        self._waiting = waiting

    def __await__(self) -> Generator[Any, None, None]:
        waiting = self._waiting
        while True:
            yield waiting
            try:
                waiting = next(self._steps)
            except StopIteration:
                return
