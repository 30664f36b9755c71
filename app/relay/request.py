"""What a client sent, and what an engine gets of it."""

from starlette.types import Receive

from app.errors import RequestTooLarge
from app.relay.disconnect import ClientDisconnected
from app.relay.exchange import Exchange
from engines.base import EngineRequest

# What an engine may see of a request's headers. Keys, cookies and addresses are not its business.
PASSED_ON_TRACED = frozenset({b"accept", b"anthropic-beta", b"anthropic-version", b"content-type"})
# Where traces are on, an engine is told of our span instead of the client's.
PASSED_ON = PASSED_ON_TRACED | {b"traceparent", b"tracestate"}


async def read_body(exchange: Exchange, receive: Receive, limit: int) -> bytes:
    """Return the whole body of a request of up to `limit` bytes.

    Raises RequestTooLarge and ClientDisconnected. Of a body that is too large the server goes on
    reading what still comes and throws it away: closing at once would reset the connection, and the
    client would see that instead of the answer.
    """
    # A length that is not a number was refused by the server's parser already.
    if int(exchange.header(b"content-length") or 0) > limit:
        raise RequestTooLarge(f"the request body is over the limit of {limit} bytes")
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise RequestTooLarge(f"the request body is over the limit of {limit} bytes")
        pieces.append(piece)
        if not message.get("more_body", False):
            return piece if len(pieces) == 1 else b"".join(pieces)


def engine_request(exchange: Exchange, body: bytes) -> EngineRequest:
    """Return what an engine is sent of a request, with a body of its own."""
    scope = exchange.scope
    target: str = scope["path"]  # one of the allow-list's, so it needs no quoting
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    record = exchange.record
    passed_on = PASSED_ON if record.trace is None else PASSED_ON_TRACED
    headers = [pair for pair in scope["headers"] if pair[0] in passed_on]
    headers.append((b"x-request-id", record.request_id.encode()))
    if record.trace is not None:
        headers += record.trace.headers()
    return EngineRequest(scope["method"], target, headers, body)
