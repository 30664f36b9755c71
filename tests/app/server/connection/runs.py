"""Coroutines under tasks of both kinds."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from app.server.connection import RequestTask
from engines.http import ImmediateFuture
from tests.waiting import PATIENCE_S

Program = Callable[[], Coroutine[Any, Any, object]]
AnyTask = RequestTask | asyncio.Task[None]


class Run:
    """One coroutine under a task of either kind, and what became of it."""

    def __init__(self, program: Program, kind: str = "request") -> None:
        self.outcome: object = "running"
        self.ended = asyncio.Event()
        self._program = program
        loop = asyncio.get_running_loop()
        self.task: AnyTask
        if kind == "asyncio":
            self.task = loop.create_task(self._recorded())
            self.task.add_done_callback(self._on_end)
        else:
            self.task = RequestTask(self._recorded(), loop, self._on_end)
            loop.call_soon(self.task.start)  # outside of the test's own task

    async def _recorded(self) -> None:
        try:
            self.outcome = await self._program()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - compared below
            self.outcome = repr(error)

    def _on_end(self, task: object) -> None:
        assert task is self.task
        self.ended.set()

    async def result(self) -> object:
        """Return what became of it, once it has ended."""
        async with asyncio.timeout(PATIENCE_S):
            await self.ended.wait()
        return self.outcome


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def outside(function: Callable[[], object]) -> "asyncio.Future[None]":
    """Call a function where no task runs, as the loop calls a protocol."""
    loop = asyncio.get_running_loop()
    called: asyncio.Future[None] = loop.create_future()

    def call() -> None:
        function()
        called.set_result(None)

    loop.call_soon(call)
    return called


def future() -> Awaitable[object]:
    return asyncio.get_running_loop().create_future()


def completion() -> Awaitable[object]:
    return ImmediateFuture[object](asyncio.get_running_loop())
