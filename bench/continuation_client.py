"""A client of the continuation run: it keeps every event of a stream, as bytes with its time."""

import asyncio
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import httptools

from bench.continuation_kinds import Kind, Request
from bench.peers import KEY

READ = 65536
# Longer than a stream may wait for an engine, and then for its turn.
PATIENCE_S = 300.0


class Ending(enum.StrEnum):
    """The end of a connection."""

    WHOLE = "whole"  # the response ended as HTTP says
    CUT = "connection closed within the response"
    LATE = "no end in time"


@dataclass(slots=True, eq=False)
class Stream:
    """One stream: its request, and what the client has got. Times are on the loop's clock."""

    kind: Kind
    variant: int
    request_id: str
    status: int = 0
    ending: Ending | None = None
    # The time at which an event was complete, and its bytes; comments are not among them.
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytes = b""  # of a response that is no stream, or the rest after the last event

    @property
    def request(self) -> Request:
        return self.kind.requests[self.variant]

    @property
    def gap_s(self) -> float:
        """Return the longest time between two events."""
        times = [at for at, _ in self.events]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    async def run(self, port: int, model: str) -> None:
        """Send the request and receive the response."""
        ending = Ending.CUT
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(self._head_and_body(model))
                    if await _receive(reader, self):
                        ending = Ending.WHOLE
                finally:
                    writer.transport.abort()
        except TimeoutError:
            ending = Ending.LATE
        except OSError:
            pass
        self.ending = ending

    def take(self, now: float, data: bytes) -> None:
        """Add bytes of the body, received now."""
        *events, self.body = (self.body + data).split(b"\n\n")
        self.events += [(now, event) for event in events if not event.startswith(b":")]

    def _head_and_body(self, model: str) -> bytes:
        raw = json.dumps({"model": model, **self.request.body}).encode()
        head = (
            f"POST {self.request.path} HTTP/1.1\r\nhost: gateway\r\n"
            f"authorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
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


async def _receive(reader: asyncio.StreamReader, stream: Stream) -> bool:
    """Read the response to its end; return whether it was complete."""
    response = _Response(stream, asyncio.get_running_loop().time)
    parser = httptools.HttpResponseParser(response)
    while not response.complete and (piece := await reader.read(READ)):
        try:
            parser.feed_data(piece)
        except httptools.HttpParserError:
            return False
        stream.status = parser.get_status_code() or stream.status
    return response.complete
