"""Random programs take the same course under a request's task as under asyncio's."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from app.server.connection import RequestTask
from engines.http import ImmediateFuture

# A program is a list of steps: a word and what belongs to it.
Step = tuple[Any, ...]
Program = list[Step]

COUNT = 3  # of futures, and of completions
numbers = st.integers(0, COUNT - 1)
waits = st.sampled_from(("future", "completion"))
steps: st.SearchStrategy[Step] = st.one_of(
    st.tuples(waits, numbers),
    st.tuples(st.just("turn")),
    st.tuples(st.just("gather"), st.lists(numbers, max_size=2)),
    st.tuples(st.just("shield"), numbers),
    st.tuples(st.sampled_from(("cancel", "uncancel"))),
)


def grown(inner: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
    """Return programs that hold other ones."""
    holding = st.tuples(st.sampled_from(("timeout", "guarded", "survived", "grouped")), inner)
    return st.lists(st.one_of(steps, holding), max_size=4)


programs = st.recursive(st.lists(steps, max_size=4), grown, max_leaves=4)
moves: st.SearchStrategy[list[Step]] = st.lists(
    st.one_of(
        st.tuples(st.just("turn")),
        st.tuples(st.just("cancel")),
        st.tuples(st.just("expire"), numbers),
        st.tuples(st.sampled_from(("complete", "fail", "drop")), waits, numbers),
    ),
    max_size=12,
)


class Course:
    """One run of a program while it is disturbed, and all that it saw, in turns of the loop."""

    def __init__(self, *, as_request: bool) -> None:
        loop = asyncio.get_running_loop()
        self.trace: list[object] = []
        self._as_request = as_request
        self._loop = loop
        self._turns = 0
        self._futures: list[asyncio.Future[int]] = [loop.create_future() for _ in range(COUNT)]
        self._completions = [ImmediateFuture[int](loop) for _ in range(COUNT)]
        self._timeouts: list[asyncio.Timeout] = []
        self._awaited: set[int] = set()
        self._ended = False

    async def run(self, program: Program, disturbances: list[Step]) -> None:
        """Run a program to its end."""
        coroutine = self._recorded(program)
        task: RequestTask | asyncio.Task[None]
        if self._as_request:
            task = RequestTask(coroutine, self._loop, self._on_end)
            self._loop.call_soon(task.start)
        else:
            task = self._loop.create_task(coroutine)
            task.add_done_callback(self._on_end)
        await self._next_turn()  # a request's task begins where it is made
        for word, *rest in disturbances:
            if word == "turn":
                await self._next_turn()
            elif word == "cancel":
                task.cancel()
            elif word == "expire":
                self._expire(*rest)
            else:
                self._disturb(word, *rest)
        for _ in range(100):
            if self._ended:
                self._forget()
                return
            for number in range(COUNT):
                self._disturb("complete", "future", number)
                self._disturb("complete", "completion", number)
            await self._next_turn()
            if self._turns > 50 + len(disturbances):
                task.cancel()
        raise AssertionError("the program does not end")

    def _forget(self) -> None:
        """Retrieve the errors that the program did not ask for."""
        for number, one in enumerate(self._futures):
            if one.done() and not one.cancelled() and number not in self._awaited:
                one.exception()

    async def _next_turn(self) -> None:
        await asyncio.sleep(0)
        self._turns += 1

    def _on_end(self, _: object) -> None:
        self._ended = True  # asyncio tells of it a turn later

    def _note(self, *seen: object) -> None:
        self.trace.append((self._turns, *seen))

    def _expire(self, number: int) -> None:
        """Have one of the last timeouts that were entered end now, if it is still entered."""
        if number < len(self._timeouts):
            with suppress(RuntimeError):  # it is expiring already
                self._timeouts[-1 - number].reschedule(0)

    def _disturb(self, word: str, kind: str, number: int) -> None:
        wait: Any = (self._futures if kind == "future" else self._completions)[number]
        if wait.done():
            return
        if word == "drop":
            wait.cancel()
        elif word == "complete":
            (wait.set_result if kind == "future" else wait.complete)(number)
        else:
            error = LookupError(f"{kind} {number}")
            (wait.set_exception if kind == "future" else wait.fail)(error)

    # The program

    async def _recorded(self, program: Program) -> None:
        try:
            await self._all(program)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - part of the trace
            self._note("raised", repr(error))
        self._note("ended")

    async def _all(self, program: Program) -> None:
        for word, *rest in program:
            self._note(word, self._current().cancelling())
            self._note(await getattr(self, f"_{word}")(*rest))

    def _current(self) -> "asyncio.Task[Any]":
        task = asyncio.current_task()
        assert task is not None
        return task

    async def _future(self, number: int) -> int:
        self._awaited.add(number)
        return await self._futures[number]

    async def _completion(self, number: int) -> object:
        if self._completions[number].done():
            return "done"  # awaited once
        return await self._completions[number]

    async def _turn(self) -> None:
        await asyncio.sleep(0)

    async def _gather(self, chosen: list[int]) -> object:
        found = await asyncio.gather(*map(self._future, chosen), return_exceptions=True)
        return repr(found)

    async def _shield(self, number: int) -> int:
        self._awaited.add(number)
        return await asyncio.shield(self._futures[number])

    async def _cancel(self) -> None:
        self._current().cancel()

    async def _uncancel(self) -> int:
        return self._current().uncancel()

    async def _timeout(self, program: Program) -> object:
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._timeouts.append(timeout)
                try:
                    await self._all(program)
                finally:
                    self._timeouts.remove(timeout)
        except TimeoutError:
            return "timed out"
        return timeout.expired()

    async def _guarded(self, program: Program) -> object:
        try:
            await self._all(program)
        except LookupError as error:
            return repr(error)
        return "whole"

    async def _survived(self, program: Program) -> object:
        try:
            await self._all(program)
        except asyncio.CancelledError:
            return self._current().uncancel()
        return "whole"

    async def _grouped(self, program: Program) -> object:
        try:
            async with asyncio.TaskGroup() as group:
                child = group.create_task(self._future(0))
                await self._all(program)
        except ExceptionGroup as errors:
            return repr(errors)
        return repr(child)[:5]


async def traced(program: Program, disturbances: list[Step], *, as_request: bool) -> list[object]:
    """Return what a program saw."""
    course = Course(as_request=as_request)
    await course.run(program, disturbances)
    return course.trace


@pytest.mark.slow
def test_random_programs_take_the_same_course_under_both_kinds_of_task() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        @given(programs, moves)
        @settings(max_examples=400, deadline=None)
        def check(program: Program, disturbances: list[Step]) -> None:
            one, other = (
                runner.run(traced(program, disturbances, as_request=as_request))
                for as_request in (False, True)
            )
            assert one == other

        check()
