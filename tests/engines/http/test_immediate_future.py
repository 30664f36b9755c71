"""An awaitable that is completed once: who waits for it goes on at once, or through the loop."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from engines.http.immediate_future import ImmediateFuture

mark: ContextVar[str] = ContextVar("mark", default="unset")


@pytest.fixture
async def completion() -> ImmediateFuture[str]:
    return ImmediateFuture(asyncio.get_running_loop())


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Driven:
    """A coroutine that a plain callback drives, as a task does that resumes at once."""

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


async def result_of(completion: ImmediateFuture[str]) -> str:
    return await completion


# A callback without a context is called at once


async def test_waiter_goes_on_before_complete_returns(completion: ImmediateFuture[str]) -> None:
    driven = Driven(result_of(completion))
    assert driven.seen is None
    completion.complete("whole")
    assert driven.seen == "whole"


async def test_waiter_gets_an_error_before_fail_returns(completion: ImmediateFuture[str]) -> None:
    driven = Driven(result_of(completion))
    completion.fail(LookupError("missing"))
    assert driven.seen == "LookupError('missing')"


async def test_cancel_resumes_the_waiter_in_a_later_turn(completion: ImmediateFuture[str]) -> None:
    driven = Driven(result_of(completion))
    assert completion.cancel()
    assert driven.seen is None, "who cancels runs on first"
    assert completion.done()
    await turns(1)
    assert driven.seen == "CancelledError()"


# asyncio's tasks ask for a context of their own


async def test_task_goes_on_through_the_loop_in_its_own_context(
    completion: ImmediateFuture[str],
) -> None:
    seen: list[str] = []

    async def program() -> None:
        mark.set("inside")
        seen.append(await completion)
        seen.append(mark.get())

    task = asyncio.create_task(program())
    await turns()
    completion.complete("whole")
    assert seen == []
    await task
    assert seen == ["whole", "inside"]
    assert mark.get() == "unset"


async def test_task_gets_an_error(completion: ImmediateFuture[str]) -> None:
    task = asyncio.create_task(result_of(completion))
    await turns()
    completion.fail(LookupError("missing"))
    with pytest.raises(LookupError, match="missing"):
        await task


async def test_task_that_is_cancelled_cancels_what_it_waits_for(
    completion: ImmediateFuture[str],
) -> None:
    task = asyncio.create_task(result_of(completion))
    await turns()
    task.cancel()
    assert completion.done()
    completion.complete("too late")
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancel_of_what_a_task_waits_for_is_raised_in_the_task(
    completion: ImmediateFuture[str],
) -> None:
    task = asyncio.create_task(result_of(completion))
    await turns()
    completion.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert task.cancelling() == 0


async def test_task_that_is_cancelled_when_its_wait_is_over_is_cancelled(
    completion: ImmediateFuture[str],
) -> None:
    task = asyncio.create_task(result_of(completion))
    await turns()
    completion.complete("whole")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_timeout_ends_the_wait_of_a_task(completion: ImmediateFuture[str]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await completion
    assert completion.done()


# Completed once


def complete(one: ImmediateFuture[str]) -> None:
    one.complete("second")


def fail(one: ImmediateFuture[str]) -> None:
    one.fail(LookupError("second"))


@pytest.mark.parametrize("second", [complete, fail])
async def test_only_the_first_result_counts(
    completion: ImmediateFuture[str], second: Callable[[ImmediateFuture[str]], None]
) -> None:
    completion.complete("first")
    second(completion)
    assert not completion.cancel()
    assert await completion == "first"


@pytest.mark.parametrize("second", [complete, fail])
async def test_only_the_first_error_counts(
    completion: ImmediateFuture[str], second: Callable[[ImmediateFuture[str]], None]
) -> None:
    completion.fail(LookupError("first"))
    second(completion)
    assert not completion.cancel()
    with pytest.raises(LookupError, match="first"):
        await completion


@pytest.mark.parametrize("second", [complete, fail])
async def test_what_was_cancelled_stays_cancelled(
    completion: ImmediateFuture[str], second: Callable[[ImmediateFuture[str]], None]
) -> None:
    assert completion.cancel()
    second(completion)
    assert not completion.cancel()
    with pytest.raises(asyncio.CancelledError):
        await completion


async def test_waiter_that_comes_late_waits_for_nothing(completion: ImmediateFuture[str]) -> None:
    completion.complete("whole")
    assert Driven(result_of(completion)).seen == "whole"


async def test_callback_that_comes_late_is_called_through_the_loop(
    completion: ImmediateFuture[str],
) -> None:
    called: list[object] = []
    completion.complete("whole")
    completion.add_done_callback(called.append)
    assert called == []
    await turns(1)
    assert called == [completion]


async def test_it_belongs_to_its_loop(completion: ImmediateFuture[str]) -> None:
    assert completion.get_loop() is asyncio.get_running_loop()
    assert asyncio.isfuture(completion)


# What it leaves


@pytest.mark.parametrize("by_task", [False, True])
async def test_error_that_was_raised_leaves_no_garbage(by_task: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        before = kept()
        await failed_wait(by_task=by_task)
        assert kept() == before
    finally:
        gc.enable()


def kept() -> int:
    """How many completions and errors there are, those that wait for the collector too."""
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
        await turns()
        one.fail(LookupError())
        assert await task == "failed"
    else:
        driven = Driven(program())
        one.fail(LookupError())
        assert driven.seen == "failed"
