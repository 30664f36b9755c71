"""Forwards one request to one engine, and the engine's response to the client."""

from collections.abc import Awaitable, Callable

from app.asgi import Headers
from app.relay.buffered_response import buffer_server_error
from app.relay.engine_call import CallResult, EngineCall
from app.relay.request_context import RequestContext
from app.relay.response import Truncated, as_gateway_error, forward_plain, read_head, send_error
from app.relay.stream import EventStream
from app.telemetry.metrics import Buckets
from app.usage import StreamMeter
from engines.base import Engine, EngineError, EngineResponse


async def forward(
    engine: Engine,
    call: EngineCall,
    request: RequestContext,
    latency: Buckets,
    result: CallResult,
    on_head: Callable[[int], Awaitable[None]] | None = None,
) -> None:
    """Send a request to an engine and its response to the client; fill in `result`.

    `on_head` is awaited with the status before any of the response is sent. Raises EngineError
    while another engine may be tried, after that GatewayError, Truncated, and what `on_head` and a
    stalled client raise.
    """
    exchange = request.exchange
    response = await engine.send(call.request)
    status = response.status
    if status >= 500:
        response = await buffer_server_error(response)
    try:
        result.status = status
        request.trace.answered(status)
        if on_head is not None:
            await on_head(status)
        head = read_head(response, withhold_metadata=call.withhold_metadata)
        exchange.model_line = call.model_line
        if head.is_stream:
            await _forward_stream(response, call, request, latency, result, head.headers)
        else:
            await forward_plain(response, request, head, result)
    finally:
        response.close()  # aborts a response that is not complete
        result.started = exchange.started
        result.complete = exchange.response_complete
        result.bytes_out = exchange.bytes_out


async def _forward_stream(
    response: EngineResponse,
    call: EngineCall,
    request: RequestContext,
    latency: Buckets,
    result: CallResult,
    headers: Headers,
) -> None:
    meter = StreamMeter(
        withhold=call.withhold_usage,
        one_choice=call.one_choice,
        wide=call.wide,
        opened=call.opened,
    )
    meter.fingerprint = call.fingerprint
    exchange = request.exchange
    try:
        await EventStream(response, request, meter, latency).run(headers)
    except EngineError as error:
        await send_error(exchange, as_gateway_error(error))
        raise Truncated(str(error)) from None
    finally:
        result.usage = meter.usage
        result.events = meter.events
        result.fingerprint = meter.fingerprint
        if meter.events:
            result.partial_usage = meter.so_far(call.prompt, exchange.bytes_out)
