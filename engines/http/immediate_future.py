"""A future that resumes its waiter at once, not in the next iteration of the event loop.

asyncio's futures call their callbacks through the loop, one iteration later. Where the awaited
bytes arrive in a callback of the loop anyway, that costs a handle, a context and a task switch per
response. An `ImmediateFuture` calls the callback from `set_result`. A waiter that passes a context,
as asyncio's tasks do, is called through the loop as usual.

It is what asyncio calls a Future-like object: one with `_asyncio_future_blocking`, awaited by one
task at a time.
"""

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any, Generic, TypeVar

ResultT = TypeVar("ResultT")


class ImmediateFuture(Generic[ResultT]):
    """Set once, to a result or an error; awaited once, by one task."""

    __slots__ = (
        "_asyncio_future_blocking", "_callback", "_context", "_done", "_error", "_loop", "_result",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asyncio_future_blocking = False
        self._done = False
        self._result: ResultT | None = None
        self._error: BaseException | None = None
        self._callback: Callable[[Any], object] | None = None
        self._context: Context | None = None

    def set_result(self, result: ResultT) -> None:
        """Set the result and resume the waiter; does nothing if it is done already."""
        if not self._done:
            self._done = True
            self._result = result
            self._resume()

    def set_exception(self, error: BaseException) -> None:
        """Set an error and resume the waiter; does nothing if it is done already."""
        if not self._done:
            self._done = True
            self._error = error
            self._resume()

    def _resume(self) -> None:
        callback, self._callback = self._callback, None
        if callback is None:
            return
        if self._context is None:
            callback(self)
        else:
            self._loop.call_soon(callback, self, context=self._context)

    # What tasks call

    def done(self) -> bool:
        return self._done

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def result(self) -> ResultT:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                error = None  # else its own traceback would keep it alive
        return self._result  # type: ignore[return-value]

    def cancel(self, msg: object = None) -> bool:
        """End the wait with CancelledError in the next iteration; return False if it is done."""
        if self._done:
            return False
        self._done = True
        self._error = asyncio.CancelledError()
        callback, self._callback = self._callback, None
        if callback is not None:
            self._loop.call_soon(callback, self, context=self._context)
        return True

    def add_done_callback(
        self, callback: Callable[[Any], object], *, context: Context | None = None
    ) -> None:
        """Call a function when it is done; there is at most one."""
        if self._done:
            self._loop.call_soon(callback, self, context=context)
        else:
            self._callback = callback
            self._context = context

    def __await__(self) -> Generator[Any, None, ResultT]:
        if not self._done:
            self._asyncio_future_blocking = True
            yield self
        return self.result()
