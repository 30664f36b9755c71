"""The client's side of one request: its answer goes out here, waiting for the client or not."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.types import Message, Scope, Send

from app.errors import Dialect, GatewayError
from app.relay.sse import error_event
from app.telemetry.access import RequestRecord

# The name in `scope["extensions"]` of a callable that our server offers: it writes one piece of a
# chunked body at once and returns whether the client takes more. Only after the head has been
# sent, and not for the last piece. Without it every chunk costs a task switch and a coroutine.
WRITE = "vllm_gateway.write"
# The same for a whole answer: status, headers that tell the body's length, body. It returns False
# where the answer must go through `send`; then nothing was sent. It takes no look at the headers,
# so they must be ours or of an answer that httptools has read.
ANSWER = "vllm_gateway.answer"
# The name of a callable that returns the whole body of the request where all of it has arrived, and
# takes it: `receive` then waits for the disconnect. None where the body must be read with
# `receive`: more is to come, or the client waits for 100 (Continue). Only before any `receive`.
BODY = "vllm_gateway.body"
# Where the server puts into the scope what it answered itself, to a request whose body came to no
# good end: its status. The application sees only a client that is gone.
REFUSED = "gateway.refused"

Headers = Sequence[tuple[bytes, bytes]]


class ClientStalled(Exception):
    """The client reads nothing of what waits for it."""

    code = "client_stalled"


class Exchange:
    """One request on its way: where its answer goes, and what is noted of it."""

    __slots__ = (
        "_answer", "_body", "_headers", "_send", "_timeout_s", "_unsent", "_write", "complete",
        "dialect", "record", "scope", "standing", "started", "streaming",
    )  # fmt: skip

    def __init__(
        self, scope: Scope, send: Send, record: RequestRecord, dialect: Dialect, timeout_s: float
    ) -> None:
        self.scope = scope
        self._headers = dict(scope["headers"])
        self.record = record
        self.dialect = dialect
        # What every answer says of the caller's limits (x-ratelimit-*), once it is known.
        self.standing: Headers = ()
        self.started = False  # the head has left
        self.streaming = False  # the head of an event stream has left
        self.complete = False  # the last byte has left
        self._send = send
        self._timeout_s = timeout_s
        extensions: Mapping[str, Any] = scope.get("extensions") or {}
        self._body: Callable[[], bytes | None] | None = extensions.get(BODY)
        # None: the server offers no way to write but `send`, or the answer has a length.
        self._write: Callable[[bytes], bool] | None = extensions.get(WRITE)
        # None: as above, or layers between want to see the head, as those do that add to it for a
        # page of another origin.
        self._answer: Callable[[int, Headers, bytes], bool] | None = (
            None if b"origin" in self._headers else extensions.get(ANSWER)
        )
        # What was pushed and could not be written; None while the client takes everything.
        self._unsent: list[bytes] | None = None

    def header(self, name: bytes) -> bytes:
        """Return a header of the request, the last of several; empty if there is none."""
        value: bytes = self._headers.get(name, b"")
        return value

    @property
    def peer(self) -> str:
        """The address that the request came from; "" where there is none, as on a Unix socket."""
        client = self.scope.get("client")
        return client[0] if client else ""

    def take_body(self) -> bytes | None:
        """Return the whole body of the request if it is here; None: it must be received."""
        return None if self._body is None else self._body()

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer. Raises ClientStalled."""
        if (
            self._answer is not None
            and _has_length(headers)
            and self._answer(status, self._with_ours(headers), body)
        ):
            self.started = self.complete = True
            self.record.status = status
            self.record.bytes_out += len(body)
            return
        await self.start(status, headers)
        await self.body(body, more=False)

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head of the answer. Raises ClientStalled."""
        self.started = True
        self.record.status = status
        if _has_length(headers):
            self._write = None
        head = self._with_ours(headers)
        await self._send({"type": "http.response.start", "status": status, "headers": head})

    def _with_ours(self, headers: Headers) -> Headers:
        return [*headers, (b"x-request-id", self.record.request_id.encode()), *self.standing]

    async def body(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the answer, and wait for a client that is slow. Raises ClientStalled."""
        if self._unsent is not None:
            await self.settle()
        first = self.record.bytes_out == 0
        self.record.bytes_out += len(data)
        self.complete = not more
        message = {"type": "http.response.body", "body": data, "more_body": more}
        if first:
            await self._send(message)  # there is nothing yet that the client could leave unread
        else:
            await self._in_time(message)

    def push(self, data: bytes) -> bool:
        """Send a piece of a stream without waiting; return whether the client takes more.

        After False, `settle` must be awaited; what is pushed before that waits for it too.
        """
        self.record.bytes_out += len(data)
        if self._unsent is not None:
            self._unsent.append(data)
        elif self._write is None:
            self._unsent = [data]
        elif self._write(data):
            return True
        else:
            self._unsent = []
        return False

    @property
    def settled(self) -> bool:
        """Whether the client has taken everything that was pushed."""
        return self._unsent is None

    async def settle(self) -> None:
        """Return when the client has taken what was pushed. Raises ClientStalled."""
        while self._unsent is not None:
            data = b"".join(self._unsent)
            self._unsent.clear()
            await self._in_time({"type": "http.response.body", "body": data, "more_body": True})
            if not self._unsent:
                self._unsent = None

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
            await self.whole(error.status, headers + error.headers(), body)

    async def _in_time(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            raise ClientStalled(f"the client read nothing for {self._timeout_s:g} s") from None


def _has_length(headers: Headers) -> bool:
    """Whether the headers of an answer tell how long its body is."""
    return any(name == b"content-length" for name, _ in headers)
