"""Tasks that run beside the task that starts them."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class BackgroundTasks:
    """Owns tasks until they end, since an event loop keeps only weak references to its tasks.

    `log` gets their unhandled exceptions; None: whoever starts a task reads its result.
    """

    def __init__(self, log: logging.Logger | None = None) -> None:
        self._log = log
        self._tasks: set[asyncio.Task[Any]] = set()

    def __bool__(self) -> bool:
        """Return whether a task is under way."""
        return bool(self._tasks)

    def start(
        self, work: Coroutine[Any, Any, Result], name: str | None = None
    ) -> asyncio.Task[Result]:
        """Run a coroutine in a task, and return the task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks; return when they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._log is not None and not task.cancelled() and (error := task.exception()):
            self._log.error("unhandled exception in %s", task.get_name(), exc_info=error)
