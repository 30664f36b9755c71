"""The task of one request: it starts at once, and goes on within the event it waited for.

asyncio.Task starts a coroutine in the next turn of the event loop, and resumes it one turn after
what it waits for has come. A request that is read whole and answered whole would take three turns;
here it takes none of its own: the bytes of the client start it, the bytes of the engine resume it
(see `engines.http.immediate_future`), and what really waits (Redis, a queue, a slow client) waits
as anywhere.

This is a third-party task as asyncio describes it (docs.python.org, "Extending": `_enter_task`,
`_leave_task`). It has what `asyncio.timeout` and its like ask of the current task, and is not in
`asyncio.all_tasks()`: who starts it keeps it.
"""

import asyncio
import contextlib
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine
from typing import Any


class RequestTask:
    """Runs a coroutine that raises nothing. Start it once, outside of any other task."""

    __slots__ = ("_cancel_next", "_cancels", "_coroutine", "_loop", "_on_end", "_waiting")

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, None],
        loop: asyncio.AbstractEventLoop,
        on_end: Callable[["RequestTask"], None],
    ) -> None:
        """`on_end` is called when the coroutine has ended."""
        self._coroutine: Coroutine[Any, Any, None] | None = coroutine
        self._loop = loop
        self._on_end = on_end
        self._waiting: Any = None  # the future that it waits for, while it waits for one
        self._cancels = 0
        self._cancel_next = False  # the next step throws CancelledError

    def start(self) -> None:
        """Run the coroutine until it waits for the first time."""
        self._step()

    def done(self) -> bool:
        return self._coroutine is None

    def cancel(self, msg: object = None) -> bool:
        """Throw CancelledError into the coroutine, soon; return whether it was still running."""
        if self._coroutine is None:
            return False
        self._cancels += 1
        if self._waiting is None or not self._waiting.cancel():
            self._cancel_next = True
        return True

    def cancelling(self) -> int:
        return self._cancels

    def uncancel(self) -> int:
        if self._cancels:
            self._cancels -= 1
        return self._cancels

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def _resume(self, future: Any) -> None:
        """Go on; in a turn of its own where another task has caused it, which runs on first."""
        self._waiting = None
        if self._cancel_next:
            with contextlib.suppress(BaseException):
                future.result()  # its error is retrieved, as asyncio.Task does
        if asyncio.current_task(self._loop) is None:
            self._step()
        else:
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        coroutine, loop = self._coroutine, self._loop
        assert coroutine is not None
        _enter_task(loop, self)  # type: ignore[arg-type]
        try:
            if self._cancel_next:
                self._cancel_next = False
                waiting = coroutine.throw(asyncio.CancelledError())
            else:
                waiting = coroutine.send(None)
        except StopIteration:
            self._coroutine = None
        except BaseException as error:
            self._coroutine = None
            told = {"message": "a request's coroutine raised", "exception": error}
            loop.call_exception_handler(told)
            if not isinstance(error, (Exception, asyncio.CancelledError)):
                raise  # KeyboardInterrupt, SystemExit
        finally:
            _leave_task(loop, self)  # type: ignore[arg-type]
            if self._coroutine is None:
                self._on_end(self)
        if self._coroutine is None:
            return
        if waiting is None:  # asyncio.sleep(0)
            loop.call_soon(self._step)
            return
        waiting._asyncio_future_blocking = False
        waiting.add_done_callback(self._resume)
        self._waiting = waiting
        if self._cancel_next and waiting.cancel():
            self._cancel_next = False
