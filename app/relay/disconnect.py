"""Knowing at once that the client has left, in every phase of a request."""

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive


class ClientDisconnected(Exception):
    """The client closed its connection before its answer was whole."""


class DisconnectWatch:
    """A context whose body is cancelled when the client leaves, and then raises ClientDisconnected.

    uvicorn's `send` says nothing when the client has gone; only `receive` does, so something must
    await it all along: while the request queues, connects, prefills and between tokens.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._over = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        self._watcher.cancel()
        if self._gone and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientDisconnected from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._over:
            self._gone = True
            self._task.cancel()
