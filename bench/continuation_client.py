"""A client of the continuation run: one stream on one connection, with the time of every event."""

import asyncio
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import httptools

from bench.continuation_answers import Answer, assemble
from bench.continuation_kinds import Kind, Request

READ = 65536
# Longer than a stream may wait for an engine, and then for its turn.
PATIENCE_S = 300.0


class Ending(enum.StrEnum):
    """The end of a connection."""

    WHOLE = "whole"  # the response ended as HTTP says
    CUT = "connection closed within the response"
    LATE = "no end in time"


@dataclass(frozen=True, slots=True)
class Watch:
    """Calls once so many events have arrived. `over` is set then, or when the stream ends."""

    events: int
    call: Callable[[], None]
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class Stream:
    """One stream: its request, and what the client has got. Times are on the loop's clock."""

    kind: Kind
    variant: int
    request_id: str
    began: float = 0.0
    ended: float = 0.0
    status: int = 0
    ending: Ending | None = None
    # The time at which an event was complete, and its bytes; comments are not among them.
    events: list[tuple[float, bytes]] = field(default_factory=list)
    watch: Watch | None = None
    body: bytes = b""  # of a response that is no stream, or the rest after the last event

    @property
    def request(self) -> Request:
        return self.kind.requests[self.variant]

    @property
    def streaming(self) -> bool:
        """True from the first event to the end."""
        return bool(self.events) and self.ending is None

    @property
    def gap_s(self) -> float:
        """Return the longest time between two events."""
        times = [at for at, _ in self.events]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def answer(self, count: int | None = None) -> Answer:
        """Return what the client has got, or what it had with so many events."""
        return assemble([event for _, event in self.events[:count]])

    def received_at(self, moment: float) -> int:
        """Return how many events had arrived at a time."""
        return sum(at <= moment for at, _ in self.events)

    async def run(self, port: int, key: str, model: str) -> None:
        """Send the request and receive the response."""
        clock = asyncio.get_running_loop().time
        self.began = clock()
        self.ending = None
        ending = Ending.CUT
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(self._head_and_body(key, model))
                    if await _receive(reader, self, clock):
                        ending = Ending.WHOLE
                finally:
                    writer.transport.abort()
        except TimeoutError:
            ending = Ending.LATE
        except OSError:
            pass
        self.ended, self.ending = clock(), ending
        if self.watch is not None:
            self.watch.over.set()

    def take(self, now: float, data: bytes) -> None:
        """Add bytes of the body, received now."""
        *events, self.body = (self.body + data).split(b"\n\n")
        for event in events:
            if not event.startswith(b":"):
                self.events.append((now, event))
        if (watch := self.watch) is not None and len(self.events) >= watch.events:
            self.watch = None
            watch.call()
            watch.over.set()

    def _head_and_body(self, key: str, model: str) -> bytes:
        raw = json.dumps({"model": model, **self.request.body}).encode()
        head = (
            f"POST {self.request.path} HTTP/1.1\r\nhost: gateway\r\n"
            f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(raw)}\r\nx-request-id: {self.request_id}\r\n"
            "connection: close\r\n\r\n"
        )
        return head.encode() + raw


class _Response:
    """Receives httptools' callbacks."""

    def __init__(self, stream: Stream, clock: Callable[[], float]) -> None:
        self.complete = False
        self._stream = stream
        self._clock = clock

    def on_body(self, body: bytes) -> None:
        self._stream.take(self._clock(), body)

    def on_message_complete(self) -> None:
        self.complete = True


async def _receive(
    reader: asyncio.StreamReader, stream: Stream, clock: Callable[[], float]
) -> bool:
    """Read the response to its end; return whether it was complete."""
    response = _Response(stream, clock)
    parser = httptools.HttpResponseParser(response)
    while not response.complete and (piece := await reader.read(READ)):
        try:
            parser.feed_data(piece)
        except httptools.HttpParserError:
            return False
        stream.status = parser.get_status_code() or stream.status
    return response.complete
