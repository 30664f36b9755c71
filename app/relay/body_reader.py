"""Reads the bodies of requests: small ones whole, others decoded and scanned while they arrive.

A slice of a body blocks the event loop for a few milliseconds at most, and of several large bodies
one slice is scanned at a time, in turn. Large compressed bodies are decoded in a thread.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from io import BytesIO

from app.asgi import BUFFERED_BYTES, ClientExchange
from app.errors import Dialect, RequestTooLarge
from app.relay.request_context import RequestContext
from app.request_body import (
    SLICE_BYTES,
    SMALL_BYTES,
    BodyScan,
    HeldBody,
    JsonText,
    ParsedBody,
    decoder_of,
    is_form,
)


class ScanTurns:
    """Lets one slice be scanned and one step be decoded at a time; other tasks run in between."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._decoding = asyncio.Lock()

    async def scan(self, scan: BodyScan, data: bytes) -> None:
        """Scan a part of a body in slices. Raises what `BodyScan.feed` raises."""
        view = memoryview(data)
        for start in range(0, len(data), SLICE_BYTES):
            async with self._turn:
                scan.feed(view[start : start + SLICE_BYTES])
                await asyncio.sleep(0)

    async def decode(self, steps: Iterator[bytes]) -> bytes | None:
        """Return the next step of a decoder, taken in a thread; None: there is none."""
        async with self._decoding:
            return await asyncio.to_thread(next, steps, None)


class _Intake:
    """Keeps and scans a body as it arrives, in UTF-8 and without its Content-Encoding."""

    def __init__(
        self, exchange: ClientExchange, limit: int, held: HeldBody, turns: ScanTurns
    ) -> None:
        self._limit = limit
        self._held = held
        self._turns = turns
        self._decoder = decoder_of(exchange.header(b"content-encoding"))
        content_type = exchange.header(b"content-type")
        self._text = None if is_form(content_type) else JsonText()
        self._scan = BodyScan(content_type, anthropic=exchange.dialect is Dialect.ANTHROPIC)
        # Grows in place and becomes bytes without a copy.
        self._whole = BytesIO()

    async def take(self, piece: bytes) -> None:
        """Take what has arrived of a body. Raises what `read_and_scan` raises."""
        if self._decoder is None:
            await self._keep(piece if self._text is None else self._text.feed(piece))
            return
        steps = self._decoder.decode(piece)
        # A thread for each step takes longer than the steps of a few bytes.
        small = len(piece) <= SMALL_BYTES
        while (
            decoded := next(steps, None) if small else await self._turns.decode(steps)
        ) is not None:
            await self._keep(decoded if self._text is None else self._text.feed(decoded))

    async def finish(self) -> ParsedBody:
        """Return the body, which has ended. Raises what `read_and_scan` raises."""
        if self._decoder is not None:
            self._decoder.finish()
        if self._text is not None:
            await self._keep(self._text.finish())
        return self._scan.finish(self._whole.getvalue())

    async def _keep(self, piece: bytes) -> None:
        check_size(self._whole.tell() + len(piece), self._limit)
        self._held.take(len(piece))
        self._whole.write(piece)
        await self._turns.scan(self._scan, piece)


def check_size(size: int, limit: int) -> None:
    """Raise RequestTooLarge for a body of more than `limit` bytes."""
    if size > limit:
        raise RequestTooLarge(f"the request body is over the limit of {limit} bytes")


async def read_if_small(exchange: ClientExchange, limit: int) -> bytes | None:
    """Return a body whose announced length its connection buffers anyway; None: it is longer."""
    length = exchange.header(b"content-length")
    if length == b"" or int(length) > min(BUFFERED_BYTES, limit):
        return None
    return b"".join([piece async for piece in _pieces(exchange, None)])


async def read_and_scan(
    request: RequestContext, raw: bytes | None, limit: int, held: HeldBody, turns: ScanTurns
) -> ParsedBody:
    """Return the body of a request, scanned while it is read; `raw`: it has arrived.

    `limit` holds for what is sent, and for what that decodes to. Raises RequestTooLarge,
    UnsupportedCoding, RateLimited, ServiceUnavailable and what `parse` raises. The connection
    discards the rest of a refused body: closing at once would reset it, and the client would see
    that instead of the response.
    """
    # The connection's parser has refused a length that is no number, or absurdly large.
    check_size(int(request.exchange.header(b"content-length") or 0), limit)
    intake = _Intake(request.exchange, limit, held, turns)
    async for piece in _pieces(request.exchange, raw):
        request.bytes_in += len(piece)
        check_size(request.bytes_in, limit)
        await intake.take(piece)
    return await intake.finish()


async def _pieces(exchange: ClientExchange, raw: bytes | None) -> AsyncIterator[bytes]:
    if raw is not None:
        yield raw
        return
    while piece := await exchange.read_body():
        yield piece
