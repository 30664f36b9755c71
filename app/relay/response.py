"""Carrying an engine's answer to the client, byte for byte, and telling what broke on the way."""

import logging

import msgspec

from app.asgi import ClientExchange, Headers
from app.errors import EngineFailed, EngineTooSlow, GatewayError
from app.relay.error_dialects import in_dialect
from app.relay.grant import Delivery
from app.relay.request_context import RequestContext
from app.relay.sse import as_event, error_event
from app.usage.token_usage import WHOLE_BYTES, WINDOW_BYTES, Usage, read_usage, read_usage_in
from engines.base import EngineError, EngineResponse, EngineTimeout

log = logging.getLogger(__name__)

# What an engine may say to a client in its head. Cookies, rules for pages of other origins, other
# addresses of the service and limits of its own are not an engine's to say; framing is between two
# neighbours (RFC 9110, section 7.6.1).
PASSED_BACK = frozenset(
    {
        b"cache-control", b"content-disposition", b"content-encoding", b"content-language",
        b"content-length", b"content-type", b"retry-after", b"x-accel-buffering",
    }
)  # fmt: skip
# vLLM's description of an answer in bytes: shapes, and usage.
METADATA = b"metadata"
NOT_ALLOWED = (401, 403)
# What vLLM answers where its model's tasks have given it no such route (Starlette's own words).
NO_ROUTE = b'{"detail":"Not Found"}'


class Head(msgspec.Struct, frozen=True):
    """What of an answer's head the client gets, and what it says of usage."""

    headers: Headers
    is_stream: bool
    usage: Usage | None = None


class NotRouted(Exception):
    """The engine has no such route: its model is for something else."""


class Truncated(Exception):
    """The answer broke after its head had left; the client has been told as far as possible."""

    code = "answer_truncated"


def head_of(answer: EngineResponse, *, bare: bool = False) -> Head:
    """Return an answer's head. Raises EngineFailed for an answer that is not fit for a client.

    `bare`: the client asked for bytes without their metadata.
    """
    status = answer.status
    found: dict[bytes, bytes] = {}
    usage: Usage | None = None
    for name, value in answer.headers:
        if name in PASSED_BACK:
            found.setdefault(name, value)
        elif name == METADATA and status < 300:
            usage = read_usage(value)
            if not bare:
                found.setdefault(name, value)
    content_type = found.get(b"content-type", b"")
    if status != 200:
        _check_status(status, content_type)
    is_stream = content_type.startswith(b"text/event-stream")
    if is_stream:
        found.pop(b"content-length", None)  # a chunk may be withheld
    return Head(list(found.items()), is_stream, usage)


def _check_status(status: int, content_type: bytes) -> None:
    """Raise EngineFailed for an answer that is not fit for a client."""
    if 300 <= status < 400:
        # vLLM redirects to an address that is built from the client's Host header.
        raise EngineFailed("the engine answered with a redirect")
    if status in NOT_ALLOWED:
        # The client's own key was good; it is the gateway's that the server does not take.
        raise EngineFailed("the engine does not accept the gateway's key")
    if status >= 500 and not content_type.startswith(b"application/json"):
        raise EngineFailed(f"the engine answered {status}")


async def relay_plain(
    answer: EngineResponse, request: RequestContext, head: Head, delivery: Delivery
) -> None:
    """Send a plain answer on; note in `delivery` what it says of its usage, before it is sent.

    An answer of up to WHOLE_BYTES is whole before its head leaves, so that a broken one becomes an
    error with a status: raises GatewayError, and NotRouted. A larger one (a batch of embeddings,
    audio) goes on as it comes: raises Truncated.
    """
    exchange, headers = request.exchange, head.headers
    delivery.usage = head.usage
    body = b""
    try:
        while not answer.ended and len(body) <= WHOLE_BYTES:
            body += await answer.read()
    except EngineError as error:
        log.warning("engine response ended early: %s", error, extra=request.log_fields)
        raise as_gateway_error(error) from None
    if answer.ended:
        if answer.status == 404 and body == NO_ROUTE:
            raise NotRouted
        if answer.status >= 400 and (said := in_dialect(body, answer.status, exchange.dialect)):
            body = said
            length = (b"content-length", b"%d" % len(body))
            headers = [*(pair for pair in headers if pair[0] != b"content-length"), length]
        delivery.usage = read_usage(body) or head.usage
        if exchange.streaming:
            # A keep-alive has promised a stream: the answer, a refusal most likely, is an event.
            await exchange.send_body(as_event(body, exchange.dialect), more=True)
        else:
            await exchange.send_response(answer.status, headers, body)
        return
    if exchange.streaming:
        raise EngineFailed("the engine did not answer with a stream")
    await exchange.start_response(answer.status, headers)
    await exchange.send_body(body, more=True)
    delivery.usage = read_usage_in(body) or head.usage
    window = body
    try:
        while not answer.ended:
            body = await answer.read()
            window = window[-WINDOW_BYTES:] + body
            delivery.usage = read_usage_in(window) or delivery.usage
            await exchange.send_body(body, more=not answer.ended)
    except EngineError as error:
        raise Truncated(str(error)) from None


async def send_error(exchange: ClientExchange, error: GatewayError) -> None:
    """Tell the client of a fault, as far as it still can be told. Raises ClientStalled.

    Before the head, the error is a whole response. In a stream it is one more event, after which
    the stream stays unfinished, so that the client sees it is not whole. Otherwise the connection
    closes.
    """
    if exchange.response_complete:
        return
    if exchange.streaming:
        await exchange.send_body(error_event(error, exchange.dialect), more=True)
    elif not exchange.started:
        exchange.model_line = b""  # of an engine whose response did not get this far
        body = error.body(exchange.dialect)
        length = b"%d" % len(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await exchange.send_response(error.status, headers + error.headers(), body)


def as_gateway_error(error: EngineError) -> GatewayError:
    """Return what a client is told of an engine that took its request and then failed."""
    if isinstance(error, EngineTimeout):
        return EngineTooSlow("the engine stopped answering in time")
    return EngineFailed("the engine failed before its answer was whole")
