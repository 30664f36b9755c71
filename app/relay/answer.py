"""Carrying an engine's answer to the client, byte for byte, and telling what broke on the way."""

import logging

import msgspec

from app.errors import EngineFailed, EngineTooSlow, GatewayError
from app.relay.exchange import Exchange, Headers
from app.relay.sse import as_event
from app.usage.reading import WHOLE_BYTES, WINDOW_BYTES, Usage, read_usage, read_usage_in
from engines.base import EngineError, EngineResponse, EngineTimeout

log = logging.getLogger(__name__)

# Framing is between two neighbours (RFC 9110, section 7.6.1); the rest of these are ours to say.
OURS = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"date", b"server", b"x-request-id",
    }
)  # fmt: skip


class Head(msgspec.Struct, frozen=True):
    """What of an answer's head the client gets."""

    headers: Headers
    is_stream: bool


class Truncated(Exception):
    """The answer broke after its head had left; the client has been told as far as possible."""

    code = "answer_truncated"


def head_of(answer: EngineResponse) -> Head:
    """Return an answer's head. Raises EngineFailed for an answer that is not fit for a client."""
    headers = [pair for pair in answer.headers if pair[0] not in OURS]
    content_type = b""
    for name, value in headers:
        if name == b"content-type":
            content_type = value
            break
    if 300 <= answer.status < 400:
        # vLLM redirects to an address that is built from the client's Host header.
        raise EngineFailed("the engine answered with a redirect")
    if answer.status >= 500 and not content_type.startswith(b"application/json"):
        raise EngineFailed(f"the engine answered {answer.status}")
    return Head(headers, content_type.startswith(b"text/event-stream"))


async def relay_plain(answer: EngineResponse, exchange: Exchange, headers: Headers) -> Usage | None:
    """Send a plain answer on; return what it says of its usage.

    An answer of up to WHOLE_BYTES is whole before its head leaves, so that a broken one becomes an
    error with a status: raises GatewayError. A larger one (a batch of embeddings, audio) goes on as
    it comes: raises Truncated.
    """
    body = b""
    try:
        while not answer.ended and len(body) <= WHOLE_BYTES:
            body += await answer.read()
    except EngineError as error:
        record = exchange.record
        told = {
            "request_id": record.request_id,
            "model": record.model,
            "engine": record.engine,
        }
        log.warning("an answer broke before its end: %s", error, extra=told)
        raise as_gateway_error(error) from None
    if answer.ended:
        usage = read_usage(body)
        if exchange.streaming:
            # A keep-alive has promised a stream: the answer, a refusal most likely, is an event.
            await exchange.body(as_event(body, exchange.dialect), more=True)
            return usage
        await exchange.whole(answer.status, headers, body)
        return usage
    if exchange.streaming:
        raise EngineFailed("the engine did not answer with a stream")
    await exchange.start(answer.status, headers)
    await exchange.body(body, more=True)
    usage = read_usage_in(body)
    window = body
    try:
        while not answer.ended:
            body = await answer.read()
            window = window[-WINDOW_BYTES:] + body
            usage = read_usage_in(window) or usage
            await exchange.body(body, more=not answer.ended)
    except EngineError as error:
        raise Truncated(str(error)) from None
    return usage


def as_gateway_error(error: EngineError) -> GatewayError:
    """Return what a client is told of an engine that took its request and then failed."""
    if isinstance(error, EngineTimeout):
        return EngineTooSlow("the engine stopped answering in time")
    return EngineFailed("the engine failed before its answer was whole")
