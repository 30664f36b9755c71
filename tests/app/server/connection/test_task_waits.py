"""All that may be awaited in a request's task, and its cancellation: as in asyncio's tasks."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engines.http import ImmediateFuture
from tests.app.server.connection.runs import Program, Run, completion, future, outside, turns
from tests.waiting import PATIENCE_S

# Cancellation


WAITS: dict[str, Callable[[], Awaitable[object]]] = {
    "future": future,
    "completion": completion,
    "sleep": lambda: asyncio.sleep(PATIENCE_S),
    "no time": lambda: asyncio.sleep(0),
    "event": lambda: asyncio.Event().wait(),
    "task": lambda: asyncio.create_task(asyncio.sleep(PATIENCE_S)),
    "shield": lambda: asyncio.shield(asyncio.sleep(0.01)),
    "wait_for": lambda: asyncio.wait_for(asyncio.sleep(PATIENCE_S), PATIENCE_S),
    "gather": lambda: asyncio.gather(*(asyncio.sleep(PATIENCE_S) for _ in range(2))),
}


@pytest.mark.parametrize("wait", WAITS)
async def test_cancel_ends_a_wait(kind: str, wait: str) -> None:
    begun = asyncio.Event()

    async def program() -> None:
        begun.set()
        while True:
            await WAITS[wait]()

    run = Run(program, kind)
    await begun.wait()
    assert run.task.cancel()
    assert run.task.cancelling() == 1
    assert await run.result() == "CancelledError()"
    await turns()
    assert not run.task.cancel()
    await asyncio.sleep(0.01 if wait == "shield" else 0)


async def test_cancel_before_the_next_step_ends_it_there(kind: str) -> None:
    waiting: ImmediateFuture[None] = ImmediateFuture(asyncio.get_running_loop())
    after: list[str] = []

    async def program() -> None:
        await waiting
        after.append("resumed")

    run = Run(program, kind)
    await turns()
    waiting.set_result(None)
    run.task.cancel()  # the step is to come
    assert await run.result() == "CancelledError()"
    assert after == []


async def test_cancel_before_the_next_step_passes_over_an_error(
    kind: str, reported: list[dict[str, Any]]
) -> None:
    pending: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future()]

    async def program() -> None:
        await pending[0]

    run = Run(program, kind)
    await turns()
    pending[0].set_exception(LookupError("too late"))
    run.task.cancel()
    assert await run.result() == "CancelledError()"
    pending.clear()
    gc.collect()
    assert reported == []


async def test_cancel_of_a_cancelled_gathering_leaves_no_error_unretrieved(
    kind: str, reported: list[dict[str, Any]]
) -> None:
    pending: list[Awaitable[object]] = [future()]

    async def program() -> None:
        await asyncio.gather(*pending)

    run = Run(program, kind)
    await turns()
    run.task.cancel()
    await turns(1)
    run.task.cancel()
    assert await run.result() == "CancelledError()"
    pending.clear()
    gc.collect()
    assert reported == []


async def test_task_that_cancels_itself_ends_at_its_next_wait(kind: str) -> None:
    after: list[str] = []

    async def program() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        after.append("cancelled")
        await future()
        after.append("resumed")

    assert await Run(program, kind).result() == "CancelledError()"
    assert after == ["cancelled"]


async def test_two_cancels_of_one_wait_end_it_once(kind: str) -> None:
    second: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def program() -> str:
        try:
            await future()
        except asyncio.CancelledError:
            return await second
        return "never"

    run = Run(program, kind)
    await turns()
    run.task.cancel()
    run.task.cancel()
    await turns()
    assert run.task.cancelling() == 2
    second.set_result("again")
    assert await run.result() == "again"


async def test_uncancel_counts_down_to_none(kind: str) -> None:
    async def program() -> list[int]:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        task.cancel()
        try:
            await future()
        except asyncio.CancelledError:
            return [task.cancelling(), *(task.uncancel() for _ in range(3)), task.cancelling()]
        return []

    assert await Run(program, kind).result() == [2, 1, 0, 0, 0]


async def test_task_that_was_cancelled_may_wait_again(kind: str) -> None:
    loop = asyncio.get_running_loop()
    second: ImmediateFuture[str] = ImmediateFuture(loop)

    async def program() -> str:
        try:
            await completion()
        except asyncio.CancelledError:
            return await second
        return "never"

    run = Run(program, kind)
    await turns()
    run.task.cancel()
    await turns()
    second.set_result("again")
    assert await run.result() == "again"


# What asyncio offers


async def test_timeout_ends_a_wait(kind: str) -> None:
    async def program() -> None:
        async with asyncio.timeout(0.001):
            await completion()

    assert await Run(program, kind).result() == "TimeoutError()"


@pytest.mark.parametrize(("inner", "outer"), [(0.001, 20), (20, 0.001), (0.001, 0.001), (0, 0)])
async def test_timeout_inside_of_another_one(kind: str, inner: float, outer: float) -> None:
    async def program() -> list[bool]:
        expired = []
        try:
            async with asyncio.timeout(outer) as outside_one:
                try:
                    async with asyncio.timeout(inner) as inside_one:
                        await completion()
                except TimeoutError:
                    expired.append(inside_one.expired())
                await future()
        except TimeoutError:
            expired.append(outside_one.expired())
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        return expired

    run = Run(program, kind)
    if outer == PATIENCE_S:
        await asyncio.sleep(0.01)
        run.task.cancel()
        assert await run.result() == "CancelledError()"
    else:
        assert await run.result() in ([True], [True, True])


@pytest.mark.parametrize("first", ["timeout", "cancel"])
async def test_cancel_at_the_moment_of_a_timeout_wins(kind: str, first: str) -> None:
    found: list[asyncio.Timeout] = []

    async def program() -> None:
        async with asyncio.timeout(None) as timeout:
            found.append(timeout)
            await future()

    run = Run(program, kind)
    await turns()
    if first == "cancel":
        run.task.cancel()
        found[0].reschedule(0)
    else:
        found[0].reschedule(0)
        await outside(run.task.cancel)
    assert await run.result() == "CancelledError()"


async def test_wait_for_gives_up(kind: str) -> None:
    async def program() -> None:
        await asyncio.wait_for(future(), 0.001)

    assert await Run(program, kind).result() == "TimeoutError()"


async def test_lock_goes_to_the_next_in_turn_although_one_was_cancelled(kind: str) -> None:
    lock = asyncio.Lock()
    order: list[int] = []

    def locking(number: int) -> Program:
        async def program() -> None:
            async with lock:
                order.append(number)
                await asyncio.sleep(0)

        return program

    async with lock:
        runs = [Run(locking(number), kind) for number in range(4)]
        await turns()
        runs[1].task.cancel()
    for run in runs:
        await run.result()
    assert order == [0, 2, 3]
    assert not lock.locked()


async def test_semaphore_condition_and_queue(kind: str) -> None:
    semaphore, condition = asyncio.Semaphore(1), asyncio.Condition()
    queue: asyncio.Queue[int] = asyncio.Queue(1)

    async def produce() -> None:
        for number in range(3):
            async with semaphore:
                await queue.put(number)
        async with condition:
            condition.notify_all()

    async def consume() -> list[int]:
        got = [await queue.get() for _ in range(2)]
        async with condition:
            await condition.wait()
        return [*got, await queue.get()]

    consuming = Run(consume, kind)
    await Run(produce, kind).result()
    assert await consuming.result() == [0, 1, 2]


async def test_gather_wait_and_as_completed(kind: str) -> None:
    async def later(number: int) -> int:
        await asyncio.sleep(0)
        return number

    async def program() -> list[object]:
        done, _ = await asyncio.wait([asyncio.create_task(later(1))])
        return [
            await asyncio.gather(later(2), later(3)),
            [task.result() for task in done],
            [await one for one in asyncio.as_completed([later(4)])],
            await asyncio.gather(future_that_fails(), return_exceptions=True),
        ]

    error = LookupError()

    async def future_that_fails() -> None:
        raise error

    assert await Run(program, kind).result() == [[2, 3], [1], [4], [error]]


@pytest.mark.parametrize("ending", ["returned", "raised", "cancelled"])
async def test_task_group(kind: str, ending: str) -> None:
    begun = asyncio.Event()
    left: list[str] = []

    async def child() -> None:
        begun.set()
        if ending == "returned":
            return
        try:
            await future()
        finally:
            left.append("child")

    async def failing() -> None:
        if ending == "raised":
            raise LookupError

    async def program() -> object:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
                group.create_task(failing())
        except ExceptionGroup as errors:
            return len(errors.exceptions)
        return "whole"

    run = Run(program, kind)
    await begun.wait()
    await turns()
    if ending == "cancelled":
        run.task.cancel()
    expected = {"returned": "whole", "raised": 1, "cancelled": "CancelledError()"}[ending]
    assert await run.result() == expected
    assert left == ([] if ending == "returned" else ["child"])


async def test_thread(kind: str) -> None:
    async def program() -> list[int]:
        return [await asyncio.to_thread(abs, number) for number in (0, -1)]

    assert await Run(program, kind).result() == [0, 1]


async def test_cancel_does_not_reach_what_is_shielded(kind: str) -> None:
    inner = asyncio.create_task(asyncio.sleep(0.01, "whole"))

    async def program() -> None:
        await asyncio.shield(inner)

    run = Run(program, kind)
    await turns()
    run.task.cancel()
    assert await run.result() == "CancelledError()"
    assert await inner == "whole"


async def test_error_of_what_is_awaited_is_raised_in_it(kind: str) -> None:
    loop = asyncio.get_running_loop()
    waits: list[Any] = [loop.create_future(), ImmediateFuture(loop)]

    async def program() -> list[str]:
        told = []
        for wait in waits:
            try:
                await wait
            except LookupError as error:
                told.append(str(error))
        return told

    run = Run(program, kind)
    await turns()
    waits[0].set_exception(LookupError("one"))
    await turns()
    waits[1].set_exception(LookupError("two"))
    assert await run.result() == ["one", "two"]
