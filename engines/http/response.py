"""An engine's response, buffered between the producer and the consumer of its bytes. No I/O."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from engines.base import EngineError, EngineProtocolError, EngineResponse

# Above this many buffered bytes of a response, its source is paused.
HIGH_WATER = 256 * 1024


class ResponseSource(Protocol):
    """The producer of a response's bytes: a connection, or an application in this process."""

    def resume(self) -> None:
        """Produce more: the buffer is empty."""

    def abort(self) -> None:
        """Stop at once: the rest is not needed."""


class ResponseBody:
    """A response in flight; see `engines.base.EngineResponse`."""

    # Class attributes: values that most plain responses never change.
    status = 0
    _size = 0
    _complete = False
    _error: Exception | None = None
    # Set while `read` or `pump` waits.
    _waiter: asyncio.Future[None] | None = None
    # Set while `pump` waits; `_chunks` is empty then.
    _sink: Callable[[bytes, bool], bool] | None = None
    # Set as long as `_sink`, which `feed` calls with all that this one declines; see `pump`.
    chunk_sink: Callable[[bytes], bool] | None = None

    def __init__(self, source: ResponseSource, loop: asyncio.AbstractEventLoop) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self._loop = loop
        self._source: ResponseSource | None = source
        self._chunks: list[bytes] = []

    @property
    def ended(self) -> bool:
        return self._complete and not self._chunks

    def take(self) -> bytes:
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._size = 0
        if self._source is not None and not self._complete:
            self._source.resume()
        return data

    def put_back(self, data: bytes) -> None:
        if data:
            self._chunks.insert(0, data)
            self._size += len(data)

    async def read(self) -> bytes:
        if not self._chunks and not self._complete and self._error is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._chunks:
            return self.take()
        if self._error is not None:
            raise self._error
        return b""

    async def pump(
        self,
        sink: Callable[[bytes, bool], bool],
        chunk_sink: Callable[[bytes], bool] | None = None,
    ) -> bool:
        if self._chunks and not sink(self.take(), self._complete):
            return False
        if self._complete:
            return True
        if self._error is not None:
            raise self._error
        self._sink, self.chunk_sink = sink, chunk_sink
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._sink = self.chunk_sink = self._waiter = None
        if self._chunks:
            return False  # they arrived after the sink had declined more
        if self._error is not None:
            raise self._error
        return self._complete

    def interrupt(self, error: EngineError) -> None:
        # A response may be complete, or its sink have failed, before its source is released.
        if self._source is not None and not self._complete and self._error is None:
            self.close()
            self.fail(error)

    def close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.abort()

    # What the source calls

    def feed(self, data: bytes, last: bool) -> bool:
        """Accept a chunk of the body; return whether the buffer is within its limit.

        `finish` follows the last chunk at once and wakes the reader. Not earlier: the reader may
        drop the response at its end, and the source must be done with it by then. What follows an
        error of the sink is dropped: the reader, which wakes in a later turn, gets the error.
        """
        sink = self._sink
        if sink is not None:
            self._complete = last
            try:
                if sink(data, last):
                    return True
            except Exception as error:  # noqa: BLE001 - raised from `pump`
                self._error = error
            self._sink = self.chunk_sink = None
        elif self._error is None:
            self._complete = last
            self._chunks.append(data)
            if last:
                return True
            self._size += len(data)
        if not last:
            self._wake()
        return self._size <= HIGH_WATER

    def finish(self) -> None:
        """Note that the response is complete."""
        self._complete = True
        self._source = None
        if self._waiter is not None:
            self._wake()

    def fail(self, error: EngineError) -> None:
        """Raise an error from the consumer's `read` or `pump`, after the bytes that arrived."""
        self._error = error
        self._source = self._sink = self.chunk_sink = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def read_body(response: EngineResponse, limit: int) -> bytes:
    """Return the whole body of a response. Raises EngineError, also above `limit` bytes."""
    chunks: list[bytes] = []
    size = 0
    while data := await response.read():
        chunks.append(data)
        size += len(data)
        if size > limit:
            raise EngineProtocolError(f"the response is over {limit} bytes")
    return b"".join(chunks)
