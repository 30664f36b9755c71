"""An engine's answer between whoever produces its bytes and whoever takes them. No I/O."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from engines.base import EngineError
from engines.http.immediate_future import ImmediateFuture

# The bound of one answer's buffer: past it its source produces no more.
HIGH_WATER = 256 * 1024


class Source(Protocol):
    """What an answer's bytes come from: a connection, an application in this process."""

    def resume(self) -> None:
        """Go on: the buffer was emptied."""
        ...

    def abort(self) -> None:
        """End now: nobody waits for the rest."""
        ...


class ResponseBody:
    """An answer in flight; see `engines.base.EngineResponse`."""

    __slots__ = (
        "_complete",
        "_error",
        "_loop",
        "_pieces",
        "_sink",
        "_size",
        "_source",
        "_waiter",
        "headers",
        "status",
    )

    def __init__(self, source: Source, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._loop = loop
        self._source: Source | None = source
        self._pieces: list[bytes] = []
        self._size = 0
        self._complete = False
        self._error: Exception | None = None
        # There while somebody waits in `read` or `pump`.
        self._waiter: ImmediateFuture[None] | None = None
        # There while somebody pumps; `_pieces` is empty then.
        self._sink: Callable[[bytes], bool] | None = None

    @property
    def ended(self) -> bool:
        return self._complete and not self._pieces

    async def read(self) -> bytes:
        if not self._pieces and not self._complete and self._error is None:
            self._waiter = ImmediateFuture(self._loop)
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._pieces:
            return self._take()
        if self._error is not None:
            raise self._error
        return b""

    async def pump(self, sink: Callable[[bytes], bool]) -> bool:
        if self._pieces and not sink(self._take()):
            return False
        if self._complete:
            return True
        if self._error is not None:
            raise self._error
        self._sink = sink
        self._waiter = ImmediateFuture(self._loop)
        try:
            await self._waiter
        finally:
            self._sink = self._waiter = None
        if self._pieces:
            return False  # they came after the sink had said no
        if self._error is not None:
            raise self._error
        return self._complete

    def close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.abort()

    # What the source tells it.

    def feed(self, data: bytes, last: bool) -> bool:
        """Take a piece of the body; return whether the buffer is still within its bound.

        `finish` follows the last piece at once and wakes the reader. Not earlier: the reader may
        drop the answer at its end, and the source must be done with it by then.
        """
        self._complete = last
        sink = self._sink
        if sink is not None:
            try:
                if sink(data):
                    return True
            except Exception as error:  # noqa: BLE001 - whoever gave the sink is told
                self._error = error
            self._sink = None
        else:
            self._pieces.append(data)
            self._size += len(data)
        if not last:
            self._wake()
        return self._size <= HIGH_WATER

    def finish(self) -> None:
        self._complete = True
        self._source = None
        self._wake()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._source = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.complete(None)

    def _take(self) -> bytes:
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._size = 0
        if self._source is not None:
            self._source.resume()
        return data
