"""The task of a request: when it runs, and what it leaves when it has ended."""

import asyncio
import gc
from contextlib import suppress
from typing import Any

import pytest

from app.server.connection import RequestTask
from engines.http import ImmediateFuture
from tests.app.server.connection.runs import Program, Run, completion, outside, turns

# When it runs


async def test_start_runs_to_the_first_wait() -> None:
    steps: list[str] = []
    waiting: ImmediateFuture[str] = ImmediateFuture(asyncio.get_running_loop())

    async def program() -> None:
        steps.append("begun")
        steps.append(await waiting)

    def start() -> None:
        task.start()
        steps.append("started")

    loop = asyncio.get_running_loop()
    ended: list[RequestTask] = []
    task = RequestTask(program(), loop, ended.append)
    assert steps == []
    await outside(start)
    assert steps == ["begun", "started"]
    assert not task.done()
    await outside(lambda: waiting.set_result("resumed"))
    assert steps == ["begun", "started", "resumed"]
    assert task.done()
    assert ended == [task]


async def test_coroutine_that_waits_for_nothing_ends_in_start() -> None:
    steps: list[str] = []

    async def program() -> None:
        steps.append("run")

    def start() -> None:
        task.start()
        steps.append("started")

    loop = asyncio.get_running_loop()
    task = RequestTask(program(), loop, lambda _: steps.append("ended"))
    await outside(start)
    assert steps == ["run", "ended", "started"]


async def test_completing_call_resumes_it_before_it_returns() -> None:
    steps: list[str] = []
    waiting: ImmediateFuture[None] = ImmediateFuture(asyncio.get_running_loop())

    async def program() -> None:
        await waiting
        steps.append("resumed")

    def complete() -> None:
        waiting.set_result(None)
        steps.append("completed")

    run = Run(program)
    await turns()
    await outside(complete)
    assert steps == ["resumed", "completed"]
    await run.result()


@pytest.mark.parametrize("completer", ["asyncio", "request"])
async def test_completing_task_runs_on_before_the_task_it_resumes(completer: str) -> None:
    steps: list[str] = []
    waiting: ImmediateFuture[None] = ImmediateFuture(asyncio.get_running_loop())

    async def program() -> None:
        await waiting
        steps.append("resumed")

    async def complete() -> None:
        waiting.set_result(None)
        steps.append("completed")

    run = Run(program)
    await turns()
    assert await Run(complete, completer).result() is None
    await run.result()
    assert steps == ["completed", "resumed"]


async def test_future_resumes_it_through_the_loop() -> None:
    steps: list[str] = []
    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def program() -> None:
        await waiting
        steps.append("resumed")

    def complete() -> None:
        waiting.set_result(None)
        steps.append("completed")

    run = Run(program)
    await turns()
    await outside(complete)
    await run.result()
    assert steps == ["completed", "resumed"]


async def test_sleep_of_no_time_lets_others_run(kind: str) -> None:
    steps: list[str] = []

    def count(name: str) -> Program:
        async def program() -> None:
            for number in range(3):
                steps.append(f"{name}{number}")
                await asyncio.sleep(0)

        return program

    runs = [Run(count(name), kind) for name in "ab"]
    for run in runs:
        await run.result()
    assert steps == ["a0", "b0", "a1", "b1", "a2", "b2"]


# The current task


async def test_it_is_the_current_task_while_it_runs(kind: str) -> None:
    seen: list[object] = []
    waiting: ImmediateFuture[None] = ImmediateFuture(asyncio.get_running_loop())

    async def program() -> None:
        seen.append(asyncio.current_task())
        await waiting
        seen.append(asyncio.current_task())
        await asyncio.sleep(0)
        seen.append(asyncio.current_task())

    run = Run(program, kind)
    await turns()
    await outside(lambda: waiting.set_result(None))
    await run.result()
    assert seen == [run.task] * 3
    assert asyncio.current_task() is not run.task


async def test_no_task_is_current_while_it_waits_or_when_it_has_ended() -> None:
    seen: list[object] = []
    waiting: ImmediateFuture[None] = ImmediateFuture(asyncio.get_running_loop())

    async def program() -> None:
        await waiting

    def watch() -> None:
        seen.append(asyncio.current_task())
        task.start()
        seen.append(asyncio.current_task())
        waiting.set_result(None)
        seen.append(asyncio.current_task())

    loop = asyncio.get_running_loop()
    task = RequestTask(program(), loop, lambda _: seen.append(asyncio.current_task()))
    await outside(watch)
    assert seen == [None] * 4
    assert task.get_loop() is loop


# The end


@pytest.mark.parametrize("kind_of_error", [LookupError, asyncio.CancelledError])
@pytest.mark.parametrize("waits", [False, True])
async def test_exception_that_escapes_reaches_the_loops_handler(
    reported: list[dict[str, Any]], kind_of_error: type[BaseException], waits: bool
) -> None:
    async def program() -> None:
        if waits:
            await asyncio.sleep(0)
        raise kind_of_error

    ended: list[RequestTask] = []
    task = RequestTask(program(), asyncio.get_running_loop(), ended.append)
    await outside(task.start)
    await turns()
    assert ended == [task]
    assert task.done()
    assert [type(context["exception"]) for context in reported] == [kind_of_error]


async def test_task_has_ended_when_that_is_told() -> None:
    seen: list[object] = []

    async def program() -> None: ...

    def on_end(task: RequestTask) -> None:
        seen.extend((task.done(), task.cancel()))

    await outside(RequestTask(program(), asyncio.get_running_loop(), on_end).start)
    assert seen == [True, False]


async def cancelled_at_a_wait() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    try:
        await completion()
    except asyncio.CancelledError:
        task.uncancel()


async def timed_out() -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            await completion()


async def failed_wait() -> None:
    waiting: ImmediateFuture[None] = ImmediateFuture(asyncio.get_running_loop())
    asyncio.get_running_loop().call_soon(waiting.set_exception, LookupError())
    with suppress(LookupError):
        await waiting


async def abandoned() -> None:
    try:
        int("none")
    except ValueError:
        await asyncio.sleep(0)


ENDINGS = {
    program.__name__: program
    for program in (cancelled_at_a_wait, timed_out, failed_wait, abandoned)
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_task_that_ended_leaves_no_garbage(ending: str) -> None:
    gc.collect()
    gc.disable()
    try:
        before = kept()
        ended = asyncio.Event()
        task = RequestTask(ENDINGS[ending](), asyncio.get_running_loop(), lambda _: ended.set())
        await outside(task.start)
        await ended.wait()
        await turns()
        del task
        assert kept() == before
    finally:
        gc.enable()


def kept() -> int:
    """How many tasks and errors there are, those that wait for the collector too."""
    kinds = (RequestTask, ImmediateFuture, LookupError, ValueError, asyncio.CancelledError)
    return sum(isinstance(one, kinds) for one in gc.get_objects())
