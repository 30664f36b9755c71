"""The change event: no change is missed, and a waiter that is canceled leaves nothing behind."""

import asyncio
import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import EngineStatus
from engines.changes import ChangeNotifier
from engines.lifecycle import TRANSITIONS, EngineState

PATIENCE_S = 10.0


async def test_every_waiter_is_woken_in_its_order() -> None:
    changes, woken = ChangeNotifier(), list[int]()
    for number in range(4):
        changes.next().add_done_callback(partial(_append, woken, number))
    changes.notify()
    await asyncio.sleep(0)
    assert woken == [0, 1, 2, 3]
    assert not changes._waiters


async def test_change_before_the_call_does_not_count() -> None:
    changes = ChangeNotifier()
    changes.notify()
    assert not changes.next().done()


async def test_condition_that_holds_does_not_wait() -> None:
    with pytest.raises(StopIteration):
        ChangeNotifier().wait_for(lambda: True).send(None)


async def test_canceled_waiter_leaves_nothing_behind() -> None:
    changes = ChangeNotifier()
    task = asyncio.create_task(changes.wait_for(lambda: False))
    await asyncio.sleep(0)
    assert len(changes._waiters) == 1
    task.cancel()
    await asyncio.wait({task})
    await asyncio.sleep(0)
    assert not changes._waiters


async def test_waiter_that_is_canceled_in_the_turn_of_the_change_disturbs_no_other() -> None:
    changes = ChangeNotifier()
    first, second = changes.next(), changes.next()
    first.cancel()
    changes.notify()
    await second


async def test_forwarded_changes_wake_the_target_until_forwarding_stops() -> None:
    source, target = ChangeNotifier(), ChangeNotifier()
    source.forward_to(target)
    waiter = target.next()
    source.notify()
    assert waiter.done()
    source.stop_forwarding(target)
    waiter = target.next()
    source.notify()
    assert not waiter.done()


def _append(found: list[int], number: int, _: object) -> None:
    found.append(number)


def _is_in(status: EngineStatus, state: EngineState) -> bool:
    return status.state is state


# A step of the walk: the writer takes a transition, a task begins to wait for a state, a waiting
# task is canceled, or the loop turns.
STEPS = st.one_of(
    st.tuples(st.just("fire"), st.integers(0, 7)),
    st.tuples(st.just("wait"), st.integers(0, 6)),
    st.tuples(st.just("cancel"), st.integers(0, 7)),
    st.tuples(st.just("turn"), st.just(0)),
)


@given(st.lists(STEPS, max_size=40))
@settings(max_examples=150, deadline=None)
def test_no_waiter_misses_the_state_that_an_engine_stays_in(steps: list[tuple[str, int]]) -> None:
    async def walk() -> None:
        status = EngineStatus()
        waiters: dict[asyncio.Task[None], EngineState] = {}
        for step, value in steps:
            if step == "fire":
                events = [event for state, event in TRANSITIONS if state is status.state]
                status.fire(events[value % len(events)])
            elif step == "wait":
                state = list(EngineState)[value % len(EngineState)]
                waiting = status.changes.wait_for(partial(_is_in, status, state))
                waiters[asyncio.create_task(waiting)] = state
            elif step == "cancel" and waiters:
                next(itertools.islice(waiters, value % len(waiters), None)).cancel()
            else:
                await asyncio.sleep(0)
        for _ in range(3):  # the future, the task that awaits it, and a task not yet begun
            await asyncio.sleep(0)
        for task, state in waiters.items():
            assert task.done() or status.state is not state
        for task in waiters:
            task.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)
        await asyncio.sleep(0)
        assert not status.changes._waiters

    asyncio.run(walk())
