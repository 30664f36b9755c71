"""Forwards an engine's event stream to the client, each chunk as it arrives.

Chunks are forwarded without an asyncio task switch: the engine's socket calls
`EventStream.deliver`, which writes to the client's. Backpressure: where the client reads slowly,
the engine's bytes wait in the bounded buffer of its connection, and then in the engine.
"""

import asyncio
import logging
from time import perf_counter

from app.asgi import ClientExchange, ClientStalled, Headers
from app.continuation import Recording
from app.relay.request_context import RequestContext
from app.relay.stream_errors import reports_error, reports_refusal
from app.sse import COMMENT, ends_stream, whole_events
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


class EventStream:
    """One event stream of an engine on its way to the client."""

    def __init__(
        self,
        response: EngineResponse,
        request: RequestContext,
        meter: StreamMeter,
        latency: Buckets,
        recording: Recording | None = None,
    ) -> None:
        """`recording`: the stream can go on at another engine."""
        self._response = response
        self._request = request
        self._exchange = request.exchange
        self._meter = meter
        self._latency = latency
        self._recording = recording
        self.failed = False  # the engine has reported a failure of its own in it
        self._held = b""  # the beginning of an event that is not complete
        self._last = 0.0  # when the last chunk was sent

    async def run(self, headers: Headers) -> None:
        """Forward the whole stream. Raises EngineError, after everything that arrived before it.

        What the meter withholds stays there: the stream may go on at another engine. Raises
        Diverged and NotReplayed where one goes on otherwise than its predecessor.
        """
        exchange = self._exchange
        if not exchange.started:
            await exchange.start_response(self._response.status, headers)
        exchange.streaming = True
        while not await self._response.pump(self.deliver):
            await exchange.flush()
        rest = b""
        death_at = find_engine_death(self._held)
        if death_at is None:
            self._note_error(self._held)
        if self._held and (rest := self._filter(self._held[:death_at])):
            self._note_sent(rest)
        if death_at is not None:
            if rest:
                await exchange.send_body(rest, more=True)
            raise EngineDied(ENGINE_DEAD_REASON)
        if self._recording is not None:
            self._recording.check_end()
        await exchange.send_body(rest + self._meter.flush(), more=False)

    def deliver(self, data: bytes) -> bool:
        """Forward a chunk; return whether the client takes more at once."""
        if self._held:
            data = self._held + data
            self._held = b""
        if self._response.ended:
            self._held = data  # sent with the end of the body, in one write
            return True
        if data[-2:] != b"\n\n":
            # Whole events only, so that an error can follow them as one more.
            data, self._held = whole_events(data)
            if not data:
                return True
        # `in` raises and clears an error inside before it searches bytes (CPython 3.11).
        if data.find(ERROR_EVENT) >= 0:
            if (at := find_engine_death(data)) is not None:
                if data := self._filter(data[:at]):
                    self._note_sent(data)
                    self._exchange.push(data)
                raise EngineDied(ENGINE_DEAD_REASON)
            self._note_error(data)
        if self._recording is not None and not (data := self._recording.pass_on(data)):
            return True
        data = self._meter.pass_on(data)
        if not data:
            return True
        self._note_sent(data)
        return self._exchange.push(data)

    @property
    def ended(self) -> bool:
        """True if the client has been sent the event that ends the stream."""
        return ends_stream(self._request.last_events)

    def _filter(self, events: bytes) -> bytes:
        """Return the part of whole events that the client gets."""
        if self._recording is not None:
            events = self._recording.pass_on(events)
        return self._meter.pass_on(events) if events else b""

    def _note_sent(self, data: bytes) -> None:
        """Observe the latency of a chunk that is sent now."""
        now, request = perf_counter(), self._request
        request.last_events = data
        if self._last:
            self._latency.observe(now - self._last)
        elif request.ttft_s is None:  # not after an interruption
            request.ttft_s = now - self._exchange.received_at
            request.first_events = data
        self._last = now

    def _note_error(self, data: bytes) -> None:
        """Note an error that the engine itself reports; the client is sent it as it is."""
        if reports_error(data):
            request = self._request
            request.fault, request.error = ENGINE_ERROR_FAULT, ENGINE_ERROR
            self.failed = not reports_refusal(data)
            log.warning("%s", ENGINE_ERROR_FAULT, extra=request.log_fields)


class KeepAlive:
    """Sends an SSE comment whenever a stream has been silent for some time, until it is stopped.

    The first comment sends status 200 before the engine has answered: an error then becomes an
    event.
    """

    def __init__(self, exchange: ClientExchange, seconds: float) -> None:
        self._exchange = exchange
        self._seconds = seconds
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        """Stop sending comments."""
        self._task.cancel()

    async def _watch(self) -> None:
        exchange = self._exchange
        seen = 0
        while not exchange.response_complete:
            await asyncio.sleep(self._seconds)
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
