"""Carrying an engine's answer to the client, byte for byte, and telling what broke on the way."""

import logging
from dataclasses import dataclass
from time import perf_counter

from starlette.types import Scope, Send

from app.errors import Dialect, EngineFailed, EngineTooSlow, GatewayError
from app.telemetry.logs import RequestRecord
from engines.base import EngineError, EngineResponse, EngineTimeout

log = logging.getLogger(__name__)

# Framing is between two neighbours (RFC 9110, section 7.6.1); the rest of these are ours to say.
OURS = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"date", b"server", b"x-request-id",
    }
)  # fmt: skip
# A plain answer up to this size is whole before its head leaves, so that a broken one becomes an
# error with a status; a larger one (a batch of embeddings, audio) goes on as it comes.
WHOLE_BYTES = 1024 * 1024
# The end of an event is waited for up to this many bytes; no event of vLLM's comes near.
EVENT_BYTES = 1024 * 1024


@dataclass(slots=True)
class Exchange:
    """One request on its way: where its answer goes and what is noted of it."""

    scope: Scope
    send: Send
    record: RequestRecord
    dialect: Dialect
    streaming: bool = False  # the head of an event stream has left

    async def body(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the answer."""
        self.record.bytes_out += len(data)
        await self.send({"type": "http.response.body", "body": data, "more_body": more})


class Truncated(Exception):
    """The answer broke after its head had left; the client has been told as far as possible."""


async def relay(answer: EngineResponse, exchange: Exchange) -> None:
    """Send an engine's answer on. Raises GatewayError before the head has left, Truncated after."""
    headers = [pair for pair in answer.headers if pair[0] not in OURS]
    content_type = next((value for name, value in headers if name == b"content-type"), b"")
    if 300 <= answer.status < 400:
        # vLLM redirects to an address that is built from the client's Host header.
        raise EngineFailed("the engine answered with a redirect")
    if answer.status >= 500 and not content_type.startswith(b"application/json"):
        raise EngineFailed(f"the engine answered {answer.status}")
    start = {"type": "http.response.start", "status": answer.status, "headers": headers}
    if content_type.startswith(b"text/event-stream"):
        await _relay_stream(answer, exchange, start)
    else:
        await _relay_plain(answer, exchange, start)


async def _relay_plain(
    answer: EngineResponse, exchange: Exchange, start: dict[str, object]
) -> None:
    body = b""
    try:
        while not answer.ended and len(body) <= WHOLE_BYTES:
            body += await answer.read()
    except EngineError as error:
        log.warning("an answer broke before its end: %s", error)
        raise as_gateway_error(error) from None
    exchange.record.status = answer.status
    await exchange.send(start)
    await exchange.body(body, more=not answer.ended)
    try:
        while not answer.ended:
            body = await answer.read()
            await exchange.body(body, more=not answer.ended)
    except EngineError as error:
        raise Truncated(str(error)) from None


async def _relay_stream(
    answer: EngineResponse, exchange: Exchange, start: dict[str, object]
) -> None:
    """Send events as they come, whole ones only, so that an error can follow them as one more."""
    record = exchange.record
    record.status = answer.status
    exchange.streaming = True
    await exchange.send(start)
    held = b""
    try:
        while True:
            data = held + await answer.read()
            more = not answer.ended
            if more:
                data, held = whole_events(data)
                if not data:
                    continue
            if record.ttft_s is None:
                record.ttft_s = perf_counter() - record.started
            await exchange.body(data, more=more)
            if not more:
                return
    except EngineError as error:
        await send_error_event(as_gateway_error(error), exchange)
        raise Truncated(str(error)) from None


def whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Split bytes of a stream after the last whole event; return what may go and what waits.

    Lines end in LF, as vLLM writes them, or in CRLF, as other servers do (WHATWG HTML, 9.2.6).
    """
    if data[-2:] == b"\n\n":
        return data, b""
    end = max(
        (data.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if mark in data), default=0
    )
    if end == 0 and len(data) > EVENT_BYTES:
        return data, b""
    return data[:end], data[end:]


def as_gateway_error(error: EngineError) -> GatewayError:
    """Return what a client is told of an engine that took its request and then failed."""
    if isinstance(error, EngineTimeout):
        return EngineTooSlow("the engine stopped answering in time")
    return EngineFailed("the engine failed before its answer was whole")


def error_event(error: GatewayError, dialect: Dialect) -> bytes:
    """Return an error as one server-sent event."""
    name = b"event: error\n" if dialect is Dialect.ANTHROPIC else b""
    return b"%sdata: %s\n\n" % (name, error.body(dialect))


async def send_error_event(error: GatewayError, exchange: Exchange) -> None:
    """Send an error of ours as the last event of a stream, which stays unfinished."""
    await exchange.body(error_event(error, exchange.dialect), more=True)


async def send_error(error: GatewayError, exchange: Exchange) -> None:
    """Send an error of ours as the whole answer."""
    body = error.body(exchange.dialect)
    exchange.record.status = error.status
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *error.headers(),
    ]
    await exchange.send({"type": "http.response.start", "status": error.status, "headers": headers})
    await exchange.body(body, more=False)
