"""Forwards an engine's event stream to the client, each chunk as it arrives.

Chunks are forwarded without an asyncio task switch: the engine's socket calls
`EventStream.deliver`, which writes to the client's. Backpressure: where the client reads slowly,
the engine's bytes wait in the bounded buffer of its connection, and then in the engine.
"""

import asyncio
import logging
from time import perf_counter

import msgspec

from app.asgi import ClientExchange, ClientStalled, Headers
from app.continuation import Recording
from app.relay.request_context import RequestContext
from app.relay.stream_errors import reports_error, reports_refusal
from app.sse import COMMENT, EVENT_BYTES, whole_events
from app.telemetry.metrics import Buckets
from app.usage import StreamMeter
from engines.base import EngineDied, EngineResponse
from engines.output import ENGINE_DEAD_REASON, ERROR_EVENT, find_engine_death

log = logging.getLogger(__name__)

# vLLM sends an event for any exception after the first chunk.
ENGINE_ERROR = "engine_error"
ENGINE_ERROR_FAULT = "the engine reported an error in its stream"
SSE_HEADERS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream(msgspec.Struct, eq=False):
    """One event stream of an engine on its way to the client."""

    response: EngineResponse
    request: RequestContext
    exchange: ClientExchange
    meter: StreamMeter
    latency: Buckets
    recording: Recording | None = None  # the stream can go on at another engine
    failed: bool = False  # the engine has reported a failure of its own in it
    held: bytes = b""  # the beginning of an event that is not complete
    last: float = 0.0  # when the last chunk was sent

    async def run(self, headers: Headers) -> None:
        """Forward the whole stream. Raises EngineError, after everything that arrived before it.

        What the meter withholds stays there: the stream may go on at another engine. Raises
        Diverged and NotReplayed where one goes on otherwise than its predecessor.
        """
        exchange = self.exchange
        if not exchange.started:
            await exchange.start_response(self.response.status, headers)
        exchange.streaming = True
        filtered = self.recording is not None and self.recording.filters
        while not await self.response.pump(self.deliver, None if filtered else self.pass_chunk):
            await exchange.flush()
        rest = b""
        death_at = find_engine_death(self.held)
        if death_at is None:
            self._note_error(self.held)
        if self.held and (rest := self._filter(self.held[:death_at])):
            self._note_sent(rest)
        if death_at is not None:
            if rest:
                await exchange.send_body(rest, more=True)
            raise EngineDied(ENGINE_DEAD_REASON)
        if self.recording is not None:
            self.recording.check_end()
        await exchange.send_body(rest + self.meter.flush(), more=False)

    def deliver(self, data: bytes, last: bool) -> bool:
        """Forward a chunk, or keep the last one; return whether the client takes more at once."""
        data = self.held + data
        if last:
            self.held = data  # sent with the end of the body, in one write
            return True
        # Whole events only, so that an error can follow them as one more.
        longest = EVENT_BYTES if self.recording is None else self.recording.event_bytes
        data, self.held = whole_events(data, longest)
        # `in` raises and clears an error inside before it searches bytes (CPython 3.11).
        if data.find(ERROR_EVENT) >= 0:
            if (at := find_engine_death(data)) is not None:
                if data := self._filter(data[:at]):
                    self._note_sent(data)
                    self.exchange.push(data)
                raise EngineDied(ENGINE_DEAD_REASON)
            self._note_error(data)
        if not (data := self._filter(data)):
            return True
        self._note_sent(data)
        return self.exchange.push(data)

    def pass_chunk(self, chunk: bytes) -> bool:
        """Forward a chunk with the engine's framing, if it is whole events that pass as they are.

        Most are, but for the token IDs that only a recording asked for. Returns False for any
        other, and does nothing.
        """
        begin = chunk.find(b"\r\n") + 2
        size = len(chunk) - begin - 2
        if (
            chunk[-4:] != b"\n\n\r\n"
            or chunk[:begin] != b"%x\r\n" % size  # as the exchange would frame it
            or chunk.find(ERROR_EVENT) >= 0
            or self.held
            or not (self.last and self.exchange.takes_chunks and self.meter.passes(chunk))
        ):
            return False
        if self.recording is not None:
            events = chunk[begin:-2]
            if (kept := self.recording.pass_on(events)) is not events:
                if not kept:
                    return True
                size = len(kept)
                chunk = b"%x\r\n%b\r\n" % (size, kept)
                begin = len(chunk) - size - 2
        # Behind the line of the size: its end and an empty line would count as an event.
        self.meter.events += chunk.count(b"\n\n", begin)
        self.exchange.push_chunk(chunk, size)
        now = perf_counter()
        self.latency.observe(now - self.last)
        self.last = now
        self.request.last_events = chunk
        return True

    def _filter(self, events: bytes) -> bytes:
        """Return the part of whole events that the client gets."""
        # None before the first whole event: a replay reads its prompt there.
        if events and self.recording is not None:
            events = self.recording.pass_on(events)
        return self.meter.pass_on(events) if events else b""

    def _note_sent(self, data: bytes) -> None:
        """Observe the latency of a chunk that is sent now."""
        now, request = perf_counter(), self.request
        request.last_events = data
        if self.last:
            self.latency.observe(now - self.last)
        elif request.ttft_s is None:  # not after an interruption
            request.ttft_s = now - self.exchange.received_at
            request.first_events = data
            if request.prefill is not None:
                request.prefill.first_token(now)
        self.last = now

    def _note_error(self, data: bytes) -> None:
        """Note an error that the engine itself reports; the client is sent it as it is."""
        if reports_error(data):
            request = self.request
            request.fault, request.error = ENGINE_ERROR_FAULT, ENGINE_ERROR
            self.failed = not reports_refusal(data)
            log.warning("%s", ENGINE_ERROR_FAULT, extra=request.log_fields)


async def send_comments(exchange: ClientExchange, seconds: float) -> None:
    """Send an SSE comment whenever a stream has been silent for so long, until canceled.

    The first comment sends status 200 before the engine has answered: an error then becomes an
    event.
    """
    seen = 0
    while not exchange.response_complete:
        await asyncio.sleep(seconds)
        # A client that has not read what it was sent needs no comment.
        if exchange.writable and exchange.bytes_out == seen:
            if not exchange.started:
                await exchange.start_response(200, SSE_HEADERS)
                exchange.streaming = True
            if exchange.streaming and not exchange.response_complete:
                exchange.comment_bytes += len(COMMENT)
                try:
                    if not exchange.push(COMMENT):
                        await exchange.flush()
                except ClientStalled:
                    return  # the next chunk meets the same stall
        seen = exchange.bytes_out
