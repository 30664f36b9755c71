"""Knowing at once that the client has left, or was cut off, in every phase of a request."""

import asyncio
from types import TracebackType
from typing import Any, Self

from starlette.types import Receive

from app.errors import InvalidApiKey
from app.relay.exchange import Exchange


class ClientDisconnected(Exception):
    """The client closed its connection before its answer was whole."""


class DisconnectWatch:
    """A context whose body is cancelled when the client leaves, and then raises ClientDisconnected.

    When the key of the request is cut off, it raises the error that says so.

    The server's `send` says nothing when the client has gone; only `receive` does, so something
    must await it all along: while the request queues, connects, prefills and between tokens. Here
    that is no task but a callback on what `receive` waits for.
    """

    __slots__ = ("_exchange", "_fault", "_over", "_receive", "_steps", "_task", "_waiting")

    def __init__(self, receive: Receive, exchange: Exchange) -> None:
        self._receive = receive
        self._exchange = exchange
        self._task: asyncio.Task[Any] | None = None  # there from entering on
        # Why the body was cancelled from here; None: it was not.
        self._fault: ClientDisconnected | InvalidApiKey | None = None
        self._over = False
        self._waiting: asyncio.Future[Any] | None = None

    def __enter__(self) -> Self:
        if self._fault is not None:
            raise self._fault
        self._task = asyncio.current_task()
        self._steps = self._receive().__await__()
        self._step()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        if self._waiting is not None:
            self._waiting.remove_done_callback(self._step)
        self._steps.close()
        fault, self._fault = self._fault, None
        assert self._task is not None
        if fault and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            try:
                raise fault from None
            finally:
                fault = None  # an error that its own traceback holds is garbage

    def cut(self, error: InvalidApiKey) -> None:
        """End the request with an error, at the latest when its body has been read.

        See `app.relay.in_flight.Cuttable`.
        """
        self._end(error)

    def _end(self, fault: ClientDisconnected | InvalidApiKey) -> None:
        if self._fault is None and not self._over and not self._exchange.complete:
            self._fault = fault
            if self._task is not None:
                self._task.cancel()

    def _step(self, _: object = None) -> None:
        """Go on with `receive` until it waits again or has told that the client left."""
        # The server says "disconnected" after a whole answer too.
        while not self._over and not self._exchange.complete:
            try:
                self._waiting = next(self._steps)
            except StopIteration as done:
                if done.value["type"] == "http.disconnect":
                    self._waiting = None
                    self._end(ClientDisconnected())
                    return
                self._steps = self._receive().__await__()
            else:
                # What a task does with a future that it is given (asyncio.Future.__await__).
                self._waiting._asyncio_future_blocking = False
                self._waiting.add_done_callback(self._step)
                return
