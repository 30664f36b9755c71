"""Carries one request to one engine and the engine's response to the client.

The other half of a request, deciding (`serving.py`), hands over a `Grant` and gets a `Delivery`
back (`grant.py`).
"""

from collections.abc import Awaitable, Callable

from app.asgi import Headers
from app.relay.buffered_response import unless_dead
from app.relay.grant import Delivery, Grant
from app.relay.request_context import RequestContext
from app.relay.response import Truncated, as_gateway_error, head_of, relay_plain, send_error
from app.relay.stream import EventStream
from app.telemetry.metrics import Buckets
from app.usage.stream_meter import StreamMeter
from engines.base import Engine, EngineError, EngineResponse


async def carry(
    engine: Engine,
    grant: Grant,
    request: RequestContext,
    gaps: Buckets,
    delivery: Delivery,
    on_head: Callable[[int], Awaitable[None]] | None = None,
) -> None:
    """Carry a request and its response; note in `delivery` what comes of it.

    `on_head` is awaited with the status before a byte of the response is sent. Raises EngineError
    as long as another engine may be asked, after that GatewayError, Truncated, and what `on_head`
    and a stalled client raise.
    """
    exchange = request.exchange
    response = await engine.send(grant.request)
    if response.status >= 500:
        response = await unless_dead(response)
    try:
        delivery.status = response.status
        request.trace.answered(response.status)
        if on_head is not None:
            await on_head(response.status)
        head = head_of(response, bare=grant.bare)
        exchange.model_line = grant.model_line
        if head.is_stream:
            await _carry_stream(response, grant, request, gaps, delivery, head.headers)
        else:
            await relay_plain(response, request, head, delivery)
    finally:
        response.close()  # one that is not whole is broken off
        delivery.started = exchange.started
        delivery.complete = exchange.response_complete
        delivery.bytes_out = exchange.bytes_out


async def _carry_stream(
    response: EngineResponse,
    grant: Grant,
    request: RequestContext,
    gaps: Buckets,
    delivery: Delivery,
    headers: Headers,
) -> None:
    meter = StreamMeter(
        withhold=grant.withhold_usage,
        one_choice=grant.one_choice,
        wide=grant.wide,
        opened=grant.opened,
    )
    meter.fingerprint = grant.fingerprint
    exchange = request.exchange
    try:
        await EventStream(response, request, meter, gaps).run(headers)
    except EngineError as error:
        await send_error(exchange, as_gateway_error(error))
        raise Truncated(str(error)) from None
    finally:
        delivery.usage = meter.usage
        delivery.events = meter.events
        delivery.fingerprint = meter.fingerprint
        if meter.events:
            delivery.so_far = meter.so_far(grant.prompt, exchange.bytes_out)
