"""ImmediateFuture: the waiter is resumed at once, or through the loop if it is a task."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from engines.http import ImmediateFuture

mark: ContextVar[str] = ContextVar("mark", default="unset")


@pytest.fixture
async def future() -> ImmediateFuture[str]:
    return ImmediateFuture(asyncio.get_running_loop())


async def run_loop(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class CallbackDriver:
    """A coroutine driver by a plain callback, as the server's request task does."""

    def __init__(self, coroutine: Coroutine[Any, Any, object]) -> None:
        self.seen: object = None
        self._coroutine = coroutine
        self.step()

    def step(self, _: object = None) -> None:
        try:
            waiting = self._coroutine.send(None)
        except StopIteration as stop:
            self.seen = stop.value
        except (LookupError, asyncio.CancelledError) as error:
            self.seen = repr(error)
        else:
            waiting._asyncio_future_blocking = False
            waiting.add_done_callback(self.step)


async def result_of(future: ImmediateFuture[str]) -> str:
    return await future


# Callbacks without a context are called at once


async def test_waiter_is_resumed_before_set_result_returns(future: ImmediateFuture[str]) -> None:
    driver = CallbackDriver(result_of(future))
    assert driver.seen is None
    future.set_result("whole")
    assert driver.seen == "whole"


async def test_error_is_raised_before_set_exception_returns(
    future: ImmediateFuture[str],
) -> None:
    driver = CallbackDriver(result_of(future))
    future.set_exception(LookupError("missing"))
    assert driver.seen == "LookupError('missing')"


async def test_cancel_resumes_the_waiter_in_a_later_iteration(future: ImmediateFuture[str]) -> None:
    driver = CallbackDriver(result_of(future))
    assert future.cancel()
    assert driver.seen is None, "the caller of cancel continues first"
    assert future.done()
    await run_loop(1)
    assert driver.seen == "CancelledError()"


# asyncio's tasks pass their own context


async def test_task_is_resumed_through_the_loop_in_its_own_context(
    future: ImmediateFuture[str],
) -> None:
    seen: list[str] = []

    async def program() -> None:
        mark.set("inside")
        seen.append(await future)
        seen.append(mark.get())

    task = asyncio.create_task(program())
    await run_loop()
    future.set_result("whole")
    assert seen == []
    await task
    assert seen == ["whole", "inside"]
    assert mark.get() == "unset"


async def test_error_is_raised_in_the_task(future: ImmediateFuture[str]) -> None:
    task = asyncio.create_task(result_of(future))
    await run_loop()
    future.set_exception(LookupError("missing"))
    with pytest.raises(LookupError, match="missing"):
        await task


async def test_cancelling_a_task_cancels_its_future(
    future: ImmediateFuture[str],
) -> None:
    task = asyncio.create_task(result_of(future))
    await run_loop()
    task.cancel()
    assert future.done()
    future.set_result("too late")
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_the_future_is_raised_in_the_task(
    future: ImmediateFuture[str],
) -> None:
    task = asyncio.create_task(result_of(future))
    await run_loop()
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert task.cancelling() == 0


async def test_task_is_cancelled_after_its_future_is_done(
    future: ImmediateFuture[str],
) -> None:
    task = asyncio.create_task(result_of(future))
    await run_loop()
    future.set_result("whole")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_timeout_cancels_the_future(future: ImmediateFuture[str]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await future
    assert future.done()


# Set once


def set_result(one: ImmediateFuture[str]) -> None:
    one.set_result("second")


def set_exception(one: ImmediateFuture[str]) -> None:
    one.set_exception(LookupError("second"))


@pytest.mark.parametrize("second", [set_result, set_exception])
async def test_only_the_first_result_counts(
    future: ImmediateFuture[str], second: Callable[[ImmediateFuture[str]], None]
) -> None:
    future.set_result("first")
    second(future)
    assert not future.cancel()
    assert await future == "first"


@pytest.mark.parametrize("second", [set_result, set_exception])
async def test_only_the_first_error_counts(
    future: ImmediateFuture[str], second: Callable[[ImmediateFuture[str]], None]
) -> None:
    future.set_exception(LookupError("first"))
    second(future)
    assert not future.cancel()
    with pytest.raises(LookupError, match="first"):
        await future


@pytest.mark.parametrize("second", [set_result, set_exception])
async def test_cancelled_future_stays_cancelled(
    future: ImmediateFuture[str], second: Callable[[ImmediateFuture[str]], None]
) -> None:
    assert future.cancel()
    second(future)
    assert not future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await future


async def test_awaiting_a_done_future_does_not_wait(future: ImmediateFuture[str]) -> None:
    future.set_result("whole")
    assert CallbackDriver(result_of(future)).seen == "whole"


async def test_callback_added_to_a_done_future_is_called_through_the_loop(
    future: ImmediateFuture[str],
) -> None:
    called: list[object] = []
    future.set_result("whole")
    future.add_done_callback(called.append)
    assert called == []
    await run_loop(1)
    assert called == [future]


async def test_future_belongs_to_its_loop(future: ImmediateFuture[str]) -> None:
    assert future.get_loop() is asyncio.get_running_loop()
    assert asyncio.isfuture(future)


# Garbage


@pytest.mark.parametrize("by_task", [False, True])
async def test_raised_error_leaves_no_garbage(by_task: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        before = count_objects()
        await failed_wait(by_task=by_task)
        assert count_objects() == before
    finally:
        gc.enable()


def count_objects() -> int:
    """Return the number of futures and errors, uncollected ones included."""
    return sum(isinstance(one, (ImmediateFuture, LookupError)) for one in gc.get_objects())


async def failed_wait(*, by_task: bool) -> None:
    one: ImmediateFuture[str] = ImmediateFuture(asyncio.get_running_loop())

    async def program() -> str:
        try:
            return await one
        except LookupError:
            return "failed"

    if by_task:
        task = asyncio.create_task(program())
        await run_loop()
        one.set_exception(LookupError())
        assert await task == "failed"
    else:
        driver = CallbackDriver(program())
        one.set_exception(LookupError())
        assert driver.seen == "failed"
