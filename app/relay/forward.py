"""Forwards one request to one engine, and the engine's response to the client."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from app.continuation import Recording
from app.errors import EngineFailed, GatewayError
from app.relay.engine_call import CallResult, EngineCall
from app.relay.request_context import RequestContext
from app.relay.response import Truncated, as_gateway_error, forward_plain, read_head, send_error
from app.relay.services import RelayServices
from app.relay.stream import EventStream
from app.routing import Replica
from app.sse import ends_stream
from app.usage import StreamMeter
from engines.base import EngineDied, EngineDrained, EngineError, EngineResponse
from engines.output import ENGINE_DEAD_REASON, reports_engine_death

# An error of vLLM's has a few hundred bytes.
MAX_ERROR_BYTES = 64 * 1024


async def forward(
    services: RelayServices,
    replica: Replica,
    call: EngineCall,
    request: RequestContext,
    result: CallResult,
    on_head: Callable[[int], Awaitable[None]] | None = None,
) -> None:
    """Send a request to an engine and its response to the client; fill in `result`.

    `on_head` is awaited with the status before any of the response is sent. A stream that can be
    moved is in the replica's `streams` while it runs. Raises EngineError while another engine may
    be tried, after that GatewayError, Truncated, Interrupted, and what `on_head` and a stalled
    client raise.
    """
    exchange = request.exchange
    response = await replica.engine.send(call.request)
    status = response.status
    if status >= 500:
        await _check_alive(response)
    broken = False
    try:
        result.status = status
        request.timeline.answered(status)
        if on_head is not None:
            await on_head(status)
        headers, is_stream, usage = read_head(response, call)
        exchange.model_line = call.model_line
        if is_stream:
            await _forward_stream(services, response, call, request, result, headers, replica)
        elif result.meter is not None:
            raise EngineFailed("the engine did not go on with a stream")
        else:
            result.usage = usage
            await forward_plain(response, request, headers, result, call)
    except Truncated:
        broken = True  # its body ends in order all the same
        raise
    finally:
        response.close()  # aborts a response that is not complete
        result.started = exchange.started
        result.complete = not broken and (exchange.response_complete or request.stream_ended)
        result.bytes_out = exchange.bytes_out


async def _check_alive(response: EngineResponse) -> None:
    """Raise EngineDied where the body of a 5xx response says that the engine is dead.

    Raises what reading it raises, too. What was read stays to be forwarded.
    """
    body = b""
    try:
        while not response.ended and len(body) < MAX_ERROR_BYTES:
            body += await response.read()
        if reports_engine_death(body):
            raise EngineDied(ENGINE_DEAD_REASON)  # noqa: TRY301 - closed as for any other fault
    except BaseException:
        response.close()
        raise
    response.put_back(body)


async def _forward_stream(
    services: RelayServices,
    response: EngineResponse,
    call: EngineCall,
    request: RequestContext,
    result: CallResult,
    headers: dict[bytes, bytes],
    replica: Replica,
) -> None:
    meter = result.meter
    if meter is None:
        meter = result.meter = request.meter = call.meter(request.endpoint.label)
    exchange, recording = request.exchange, call.recording
    active = recording if recording is not None and recording.active else None
    request.timeline.begin_stream()
    latency = services.metrics.inter_token_latency.buckets((request.model,))
    stream = EventStream(response, request, exchange, meter, latency, active)
    movable: MovableStream | None = None
    if recording is not None and recording.ways.any:
        movable = MovableStream(response, recording)
        replica.streams.add(movable)
    try:
        await stream.run([*headers.items()])
    except EngineError as error:
        if recording is not None:
            raise Interrupted(error, recording, meter) from None
        await end_stream(request, meter, as_gateway_error(error))
        raise Truncated(str(error)) from None
    except asyncio.CancelledError:
        request.stream_ended = ends_stream(request.last_events)
        raise
    finally:
        if movable is not None:
            replica.streams.discard(movable)
        result.usage = meter.usage
        result.events = meter.events
        result.fingerprint = meter.fingerprint
        result.failed = stream.failed
        if meter.events:
            # Text only: a client is not charged for the comments that it got while it waited.
            bytes_out = exchange.bytes_out - exchange.comment_bytes
            known = (None, None) if recording is None else recording.count_tokens()
            result.partial_usage = meter.so_far(
                known[0] or call.plan.cost.prompt, bytes_out, known[1]
            )


async def end_stream(request: RequestContext, meter: StreamMeter, error: GatewayError) -> None:
    """End a broken stream with what is withheld of it, and an error event."""
    if withheld := meter.flush():
        await request.exchange.send_body(withheld, more=True)
    await send_error(request, error)


class Interrupted(Exception):
    """A recorded stream was interrupted, and may go on elsewhere; `fault` is the engine's."""

    def __init__(self, fault: EngineError, recording: Recording, meter: StreamMeter) -> None:
        super().__init__(str(fault))
        self.fault = fault
        self.recording = recording
        self.meter = meter


class MovableStream(msgspec.Struct, eq=False):
    """A stream at an engine, as far as it can be moved; see `app.routing.Movable`."""

    response: EngineResponse
    recording: Recording

    def move(self) -> None:
        if self.recording.can_go_on():
            self.response.interrupt(EngineDrained("the engine is drained"))
