"""Reads the bodies of requests: small ones whole, others scanned while they arrive.

A slice of a body blocks the event loop for a few milliseconds at most, and of several large bodies
one slice is scanned at a time, in turn.
"""

import asyncio
from io import BytesIO

from app.asgi import BUFFERED_BYTES, ClientExchange
from app.errors import Dialect, RequestTooLarge
from app.relay.request_context import RequestContext
from app.request_body import SLICE_BYTES, BodyScan, HeldBody, ParsedBody


class ScanTurns:
    """Lets one slice be scanned at a time; other tasks run in between."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def scan(self, scan: BodyScan, data: bytes) -> None:
        """Scan a part of a body in slices. Raises what `BodyScan.feed` raises."""
        view = memoryview(data)
        for start in range(0, len(data), SLICE_BYTES):
            async with self._turn:
                scan.feed(view[start : start + SLICE_BYTES])
                await asyncio.sleep(0)


def check_announced_size(exchange: ClientExchange, limit: int) -> None:
    """Raise RequestTooLarge for a Content-Length of more than `limit` bytes."""
    # The connection's parser has refused a length that is no number, or absurdly large.
    if int(exchange.header(b"content-length") or 0) > limit:
        raise _too_large(limit)


def check_size(raw: bytes, limit: int) -> None:
    """Raise RequestTooLarge for a body of more than `limit` bytes."""
    if len(raw) > limit:
        raise _too_large(limit)


async def read_if_small(exchange: ClientExchange, limit: int) -> bytes | None:
    """Return a body whose announced length its connection buffers anyway; None: it is longer."""
    length = exchange.header(b"content-length")
    if length == b"" or int(length) > min(BUFFERED_BYTES, limit):
        return None
    pieces: list[bytes] = []
    while piece := await exchange.read_body():
        pieces.append(piece)
    return b"".join(pieces)


async def read_and_scan(
    request: RequestContext, limit: int, held: HeldBody, turns: ScanTurns
) -> ParsedBody:
    """Return the body of a request, scanned while it is read.

    Raises RequestTooLarge, RateLimited, ServiceUnavailable and what `parse` raises. The connection
    discards the rest of a refused body: closing at once would reset it, and the client would see
    that instead of the response.
    """
    exchange = request.exchange
    scan = _new_scan(exchange)
    # Grows in place and becomes bytes without a copy.
    whole = BytesIO()
    while piece := await exchange.read_body():
        request.bytes_in += len(piece)
        if request.bytes_in > limit:
            raise _too_large(limit)
        held.take(len(piece))
        whole.write(piece)
        await turns.scan(scan, piece)
    return scan.finish(whole.getvalue())


async def scan_body(
    exchange: ClientExchange, raw: bytes, held: HeldBody, turns: ScanTurns
) -> ParsedBody:
    """Return a body that has arrived, scanned. Raises what `read_and_scan` raises."""
    held.take(len(raw))
    scan = _new_scan(exchange)
    await turns.scan(scan, raw)
    return scan.finish(raw)


def _new_scan(exchange: ClientExchange) -> BodyScan:
    anthropic = exchange.dialect is Dialect.ANTHROPIC
    return BodyScan(exchange.header(b"content-type"), anthropic=anthropic)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the request body is over the limit of {limit} bytes")
