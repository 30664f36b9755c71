"""Reading a request's body: counted and scanned while it arrives, so that a bad one ends early.

No slice of a body keeps the event loop for longer than a few milliseconds, and of several large
bodies one slice is scanned at a time, in turn.
"""

import asyncio
from io import BytesIO

from app.asgi import BUFFERED_BYTES, ClientExchange
from app.errors import RequestTooLarge
from app.relay.body import SLICE_BYTES, BodyScan, ParsedBody
from app.relay.body_memory import HeldBody
from app.relay.request_context import RequestContext


class ScanTurns:
    """Lets one slice be scanned at a time; the event loop does everything else in between."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def scan(self, scan: BodyScan, data: bytes) -> None:
        """Scan a part of a body, in slices. Raises what `BodyScan.feed` raises."""
        view = memoryview(data)
        for start in range(0, len(data), SLICE_BYTES):
            async with self._turn:
                scan.feed(view[start : start + SLICE_BYTES])
                await asyncio.sleep(0)


def check_size(exchange: ClientExchange, limit: int) -> None:
    """Raise RequestTooLarge where a request announces a body of more than `limit` bytes."""
    # The server's parser has refused a length that is no number, or an absurd one.
    if int(exchange.header(b"content-length") or 0) > limit:
        raise _too_large(limit)


def check_body(raw: bytes, limit: int) -> None:
    """Raise RequestTooLarge for a body of more than `limit` bytes."""
    if len(raw) > limit:
        raise _too_large(limit)


def announces_little(exchange: ClientExchange, limit: int) -> bool:
    """Return whether a request announces a body that its connection would buffer anyway."""
    length = exchange.header(b"content-length")
    return length != b"" and int(length) <= min(BUFFERED_BYTES, limit)


async def read_small(exchange: ClientExchange) -> bytes:
    """Return a body that was announced as small."""
    pieces: list[bytes] = []
    while piece := await exchange.read_body():
        pieces.append(piece)
    return b"".join(pieces)


async def read_scanned(
    request: RequestContext, limit: int, held: HeldBody, turns: ScanTurns
) -> ParsedBody:
    """Return the body of a request, read to its end and scanned on the way.

    Raises RequestTooLarge, RateLimited, ServiceUnavailable and what `parse` raises. Of a body that
    is refused the server goes on reading what still comes and throws it away: closing at once would
    reset the connection, and the client would see that instead of the answer.
    """
    exchange = request.exchange
    scan = BodyScan(exchange.header(b"content-type"))
    # It grows in place, and what it holds becomes bytes without a copy.
    whole = BytesIO()
    while piece := await exchange.read_body():
        request.bytes_in += len(piece)
        if request.bytes_in > limit:
            raise _too_large(limit)
        held.take(len(piece))
        whole.write(piece)
        await turns.scan(scan, piece)
    return scan.finish(whole.getvalue())


async def scan_whole(
    exchange: ClientExchange, raw: bytes, held: HeldBody, turns: ScanTurns
) -> ParsedBody:
    """Return a body that is here already. Raises what `read_scanned` raises of a body."""
    held.take(len(raw))
    scan = BodyScan(exchange.header(b"content-type"))
    await turns.scan(scan, raw)
    return scan.finish(raw)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the request body is over the limit of {limit} bytes")
