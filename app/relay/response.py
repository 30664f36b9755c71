"""Forwards an engine's plain response to the client byte for byte, and sends errors."""

import logging

from app.asgi import ClientExchange, Headers
from app.errors import EngineFailed, EngineTooSlow, GatewayError
from app.relay.engine_call import AUDIO_HEAD_BYTES, CallResult, EngineCall
from app.relay.engine_errors import translate_error, with_own_count
from app.relay.reasoning_field import with_reasoning_content
from app.relay.request_context import RequestContext
from app.relay.stream_errors import engine_error_event, error_event
from app.request_body import SPEECH, pcm_rate
from app.usage import WHOLE_BYTES, WINDOW_BYTES, Usage, read_usage, read_usage_in
from engines.base import EngineError, EngineResponse, EngineTimeout

log = logging.getLogger(__name__)

# Response headers that are forwarded. Cookies, CORS, alternative services and rate limits are not
# for an engine to set; framing is hop by hop (RFC 9110, section 7.6.1).
FORWARDED_HEADERS = frozenset(
    {
        b"cache-control", b"content-disposition", b"content-encoding", b"content-language",
        b"content-length", b"content-type", b"retry-after", b"x-accel-buffering",
    }
)  # fmt: skip
# vLLM's description of a response in bytes: shapes, and usage.
METADATA = b"metadata"
KEY_REJECTED = (401, 403)
AUDIO = b"audio/"
# Where the bytes of a second are in the header of a WAV file.
WAV_RATE = slice(28, 32)
# vLLM's response where its model has no such task, hence no such route (Starlette's wording).
NO_ROUTE = b'{"detail":"Not Found"}'


class NotRouted(Exception):
    """The engine has no such route: its model is for another task."""


class Truncated(Exception):
    """The response ended early, after its head had been sent."""

    code = "answer_truncated"


def read_head(
    response: EngineResponse, call: EngineCall
) -> tuple[dict[bytes, bytes], bool, Usage | None]:
    """Return the headers for the client, whether it is a stream, and the usage in its headers.

    Raises EngineFailed for a response that is not fit for a client.
    """
    status = response.status
    found: dict[bytes, bytes] = {}
    usage: Usage | None = None
    for name, value in response.headers:
        if name in FORWARDED_HEADERS:
            if name not in found:
                found[name] = value
        elif name == METADATA and status < 300:
            usage = read_usage(value)
            if not call.plan.rewrite.withhold_metadata:
                found.setdefault(name, value)
    content_type = found.get(b"content-type", b"")
    if status != 200:
        _check_status(status, content_type)
    is_stream = content_type.startswith(b"text/event-stream")
    if is_stream:
        found.pop(b"content-length", None)  # a chunk may be withheld
        found.setdefault(b"cache-control", b"no-cache")
        found[b"x-accel-buffering"] = b"no"  # nginx would collect the events
    return found, is_stream, usage


def _check_status(status: int, content_type: bytes) -> None:
    """Raise EngineFailed for a response that is not fit for a client."""
    if 300 <= status < 400:
        # vLLM redirects to an address that is built from the client's Host header.
        raise EngineFailed("the engine answered with a redirect")
    if status in KEY_REJECTED:
        raise EngineFailed("the engine does not accept the gateway's key")
    if status >= 500 and not content_type.startswith(b"application/json"):
        raise EngineFailed(f"the engine answered {status}")


async def forward_plain(
    response: EngineResponse,
    request: RequestContext,
    headers: dict[bytes, bytes],
    result: CallResult,
    call: EngineCall,
) -> None:
    """Send a response that is no stream; note its usage in `result` before it is sent.

    `result` has the usage of the response's headers.

    A response of up to WHOLE_BYTES is read before its head is sent, so that a broken one becomes an
    error with a status: raises GatewayError and NotRouted. A larger one (a batch of embeddings,
    images) and sound are forwarded as they arrive: raises Truncated.
    """
    exchange, status, most = request.exchange, response.status, WHOLE_BYTES
    content_type = b""
    if request.endpoint.label == SPEECH:
        content_type = headers.get(b"content-type", b"")
        if content_type.startswith(AUDIO) and status < 300:
            most = AUDIO_HEAD_BYTES
    try:
        body = response.take()
        while not (ended := response.ended) and len(body) <= most:
            body += await response.read()
    except EngineError as error:
        log.warning("engine response ended early: %s", error, extra=request.log_fields)
        raise as_gateway_error(error) from None
    if most == AUDIO_HEAD_BYTES:
        result.bytes_per_second = bytes_per_second(
            content_type, body, call.plan.value("sample_rate")
        )
    if not ended:
        await _forward_large(response, exchange, [*headers.items()], result, body)
        return
    if status >= 400:
        if status == 404 and body == NO_ROUTE:
            raise NotRouted
        body = with_own_count(body, len(call.plan.body.members))
        body = translate_error(body, status, exchange.dialect) or body
    result.usage = read_usage(body) or result.usage
    if call.both_fields:
        body = with_reasoning_content(body)
    if exchange.streaming:
        # A keep-alive comment has begun a stream: an error becomes its only event.
        if status < 400:
            raise EngineFailed("the engine did not answer with a stream")
        request.aborted_status = status
        await exchange.send_body(engine_error_event(body, request), more=False)
    else:
        headers.pop(b"content-length", None)  # of what the engine sent
        await exchange.send_response(status, [*headers.items()], body)


def bytes_per_second(content_type: bytes, body: bytes, sample_rate: bytes) -> int:
    """Return the bytes of a second of uncompressed sound; 0: not known.

    By the beginning of its body, or of its request's `sample_rate`.
    """
    kind = content_type.partition(b";")[0].strip()
    if kind == b"audio/pcm":
        return pcm_rate(sample_rate)
    is_wav = kind in (b"audio/wav", b"audio/x-wav") and body.startswith(b"RIFF")
    return int.from_bytes(body[WAV_RATE], "little") if is_wav else 0


async def _forward_large(
    response: EngineResponse,
    exchange: ClientExchange,
    headers: Headers,
    result: CallResult,
    body: bytes,
) -> None:
    """Send a response as it arrives; `body` is the beginning of its body."""
    if exchange.streaming:
        raise EngineFailed("the engine did not answer with a stream")
    await exchange.start_response(response.status, headers)
    await exchange.send_body(body, more=True)
    result.usage = read_usage_in(body) or result.usage
    window = body
    try:
        while not response.ended:
            body = await response.read()
            window = window[-WINDOW_BYTES:] + body
            result.usage = read_usage_in(window) or result.usage
            await exchange.send_body(body, more=not response.ended)
    except EngineError as error:
        raise Truncated(str(error)) from None


async def send_error(request: RequestContext, error: GatewayError) -> None:
    """Send an error to the client, as far as that is still possible. Raises ClientStalled.

    Before the head, it is a response of its own. In a stream it is the last event, without the end
    marker behind it, and the body ends in order: agents report a cut connection instead of the
    event before it. Otherwise the connection closes.
    """
    exchange = request.exchange
    if exchange.response_complete:
        return
    if exchange.streaming:
        await exchange.send_body(error_event(error, request), more=False)
    elif not exchange.started:
        exchange.model_line = b""  # of an engine whose response was not sent
        headers = [(b"content-type", b"application/json"), *error.headers()]
        await exchange.send_response(error.status, headers, error.body(exchange.dialect))


def as_gateway_error(error: EngineError) -> GatewayError:
    """Return the client's error for an engine that took its request and then failed."""
    if isinstance(error, EngineTimeout):
        return EngineTooSlow("the engine stopped answering in time")
    return EngineFailed("the engine failed before its answer was whole")
