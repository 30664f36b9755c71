"""Permits: at once, after a wait, or refused; no slot is lost or given twice.

Tests let every runnable task run instead of waiting for time to pass.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from app.admission import Admission, Permit, model_queue
from app.admission.fair_queue import QueueEntry
from app.errors import EngineOverloaded, EngineUnavailable, ModelNotFound
from app.settings import QueueSettings
from app.telemetry.metrics import Metrics, ScrapedValues
from engines.base import ChangeNotifier
from tests.waiting import PATIENCE_S, run_pending_tasks


@pytest.fixture(autouse=True)
async def calm() -> AsyncIterator[None]:
    """Check that no callback on the loop fails."""
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    yield
    assert faults == []


@dataclass(eq=False)
class Scenario:
    """An admission for the model "demo", and the requests of a test."""

    admission: Admission
    metrics: Metrics
    ready: list[int]  # number of READY engines, to be changed
    engine_changes: ChangeNotifier
    begun: list[str] = field(default_factory=list)
    _ends: dict[str, asyncio.Event] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[float | None]] = field(default_factory=dict)

    def ask(self, name: str, *claim: Any, model: str | None = "demo") -> asyncio.Task[float | None]:
        """Start a request for a permit, which it holds until `end`."""
        self._ends[name] = asyncio.Event()
        task = asyncio.create_task(self._run(name, claim or (name,), model))
        self.tasks[name] = task
        return task

    async def _run(self, name: str, claim: tuple[Any, ...], model: str | None) -> float | None:
        with await self.admission.acquire(model, *claim) as permit:
            self.begun.append(name)
            await self._ends[name].wait()
            return permit.waited_s

    def end(self, name: str) -> None:
        """End a request at the next turn of the loop."""
        self._ends[name].set()

    async def finish(self, name: str) -> None:
        """End a request, and let everything that follows run."""
        self.end(name)
        await run_pending_tasks()

    async def close(self) -> None:
        """End all requests; nothing may be left."""
        for end in self._ends.values():
            end.set()
        if self.tasks:
            await asyncio.wait(self.tasks.values())
        assert self.admission.in_flight == 0
        assert self.admission.waiting == 0
        assert self.gauge("gateway_queue_depth") == 0
        assert self.gauge("gateway_requests_in_flight") == 0
        async with asyncio.timeout(PATIENCE_S):
            await self.admission.wait_until_idle()

    def gauge(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"model": "demo"}) or 0.0


def scenario(ready: int = 1, **queue: Any) -> Scenario:
    metrics = Metrics()
    engines = [ready]
    queues = {"demo": QueueSettings(**queue), "other": QueueSettings(max_in_flight=1)}
    changes = ChangeNotifier()
    admission = Admission(
        metrics, queues, lambda _, slots: int(slots) * max(engines[0], 1), changes
    )
    ScrapedValues(metrics).watch_in_flight(admission.in_flight_by_model)
    return Scenario(admission, metrics, engines, changes)


Start = Callable[..., Scenario]


@pytest.fixture
async def start(calm: None) -> AsyncIterator[Start]:
    """Make scenarios that are closed, and checked for leaks, when the test ends."""
    made: list[Scenario] = []

    def make(ready: int = 1, **queue: Any) -> Scenario:
        made.append(scenario(ready, **queue))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def at_once(permit: Awaitable[Permit]) -> Permit:
    """Return the permit, which must be available without a turn of the loop."""
    with pytest.raises(StopIteration) as stop:
        next(permit.__await__())
    result: Permit = stop.value.value
    return result


async def test_without_a_limit_no_request_waits(start: Start) -> None:
    one = start()
    held = [at_once(one.admission.acquire("demo", "a")) for _ in range(1000)]
    assert {permit.waited_s for permit in held} == {None}
    assert one.admission.in_flight == one.gauge("gateway_requests_in_flight") == 1000
    for permit in held:
        with permit:
            pass


async def test_free_slot_is_acquired_without_a_turn_of_the_loop(start: Start) -> None:
    one = start(max_in_flight=2)
    with at_once(one.admission.acquire("demo", "a")), at_once(one.admission.acquire("demo", "b")):
        assert one.admission.in_flight == 2
        one.ask("c")
        await run_pending_tasks()
        assert one.admission.waiting == one.gauge("gateway_queue_depth") == 1
    await run_pending_tasks()
    assert one.begun == ["c"]


async def test_failed_request_releases_its_slot(start: Start) -> None:
    one = start(max_in_flight=1)
    with pytest.raises(ZeroDivisionError), at_once(one.admission.acquire("demo", "a")):
        raise ZeroDivisionError


async def test_request_without_a_model_never_waits(start: Start) -> None:
    one = start(max_in_flight=1)
    with at_once(one.admission.acquire("demo", "a")):
        held = [at_once(one.admission.acquire(None, "a")) for _ in range(100)]
        assert one.admission.in_flight == 101
        for permit in held:
            with permit:
                pass


async def test_models_have_separate_queues(start: Start) -> None:
    one = start(max_in_flight=1)
    with at_once(one.admission.acquire("demo", "a")), at_once(one.admission.acquire("other", "a")):
        pass


async def test_permit_has_the_wait_if_there_was_one(start: Start) -> None:
    one = start(max_in_flight=1)
    first, second = one.ask("a"), one.ask("b")
    await run_pending_tasks()
    await one.finish("a")
    await one.finish("b")
    assert await first is None
    waited_s = await second
    assert waited_s is not None
    assert waited_s >= 0
    assert one.gauge("gateway_queue_wait_seconds_count") == 1


class TestOrder:
    async def test_keys_take_turns(self, start: Start) -> None:
        one = start(max_in_flight=1)
        one.ask("holder")
        for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
            one.ask(name, name[0])
        await run_pending_tasks()
        while one.begun != (before := list(one.begun)) or len(before) < 7:
            await one.finish(before[-1])
        assert one.begun == ["holder", "a1", "b1", "c1", "a2", "c2", "a3"]

    async def test_order_follows_priority_weight_and_tokens(self, start: Start) -> None:
        one = start(max_in_flight=1)
        one.ask("holder")
        for number in range(3):
            one.ask(f"behind-{number}", "z", 1, 1.0, 10)
            one.ask(f"huge-{number}", "h", 0, 1.0, 1000)
            one.ask(f"heavy-{number}", "w", 0, 4.0, 1000)
            one.ask(f"small-{number}", "s", 0, 1.0, 100)
        await run_pending_tasks()
        for _ in range(12):
            await one.finish(one.begun[-1])
        names = [name for name in one.begun if not name.startswith("behind")]
        assert names[:6] == ["holder", "huge-0", "heavy-0", "small-0", "small-1", "small-2"]
        assert names[6:] == ["heavy-1", "heavy-2", "huge-1", "huge-2"]

    async def test_new_request_does_not_overtake_waiting_ones(self, start: Start) -> None:
        one = start(max_in_flight=1)
        held = at_once(one.admission.acquire("demo", "a"))
        one.ask("waits")
        await run_pending_tasks()
        with held:
            pass
        # The slot is granted already, though its task has not run yet.
        one.ask("late")
        await run_pending_tasks()
        assert one.begun == ["waits"]


class TestRefusal:
    async def test_full_queue_refuses_at_once(self, start: Start) -> None:
        one = start(max_in_flight=1, max_waiting=2)
        for name in ("runs", "waits-1", "waits-2"):
            one.ask(name)
        await run_pending_tasks()
        with pytest.raises(EngineOverloaded) as caught:
            next(one.admission.acquire("demo", "a").__await__())
        error = caught.value
        assert error.retry_after_s is not None
        assert 1 <= error.retry_after_s <= 60
        assert error.message.startswith("the queue of model 'demo' is full; try")
        assert error.message.endswith(f"; try again in {error.retry_after_s} s")
        await one.finish("runs")
        one.ask("finds a place")
        await run_pending_tasks()
        assert one.admission.waiting == 2

    async def test_key_that_fills_the_queue_gives_places_to_others(self, start: Start) -> None:
        one = start(max_in_flight=1, max_waiting=8)
        one.ask("runs")
        flood = [one.ask(f"flood-{number}", "flood") for number in range(8)]
        await run_pending_tasks()
        others = [one.ask(f"other-{number}", "other") for number in range(6)]
        single = one.ask("single")
        urgent = one.ask("urgent", "flood", -1)
        await run_pending_tasks()
        refused = [task for task in (*flood, *others, single, urgent) if task.done()]
        print(f"{sum(not task.done() for task in (*others, single))} of 7 of other keys wait")
        # Half each, then one for the third and one for the urgent one; the newest have left.
        assert refused == [*flood[3:], *others[3:]]
        for task in refused:
            with pytest.raises(EngineOverloaded, match="the queue of model 'demo' is full; try"):
                await task
        assert one.admission.waiting == 8

    async def test_less_important_request_displaces_none(self, start: Start) -> None:
        one = start(max_in_flight=1, max_waiting=2)
        for number in range(3):
            one.ask(f"flood-{number}", "flood", 0)
        await run_pending_tasks()
        with pytest.raises(EngineOverloaded):
            await one.ask("other", "other", 1)
        one.ask("important", "important", -1)
        await run_pending_tasks()
        assert one.tasks["flood-2"].done()

    async def test_displaced_request_that_is_canceled_leaves_nothing(self, start: Start) -> None:
        one = start(max_in_flight=1, max_waiting=2)
        for number in range(3):
            one.ask(f"flood-{number}", "flood")
        await run_pending_tasks()
        one.ask("other")
        await asyncio.sleep(0)
        one.tasks["flood-2"].cancel()
        await asyncio.wait([one.tasks["flood-2"]])
        assert one.admission.waiting == 2

    async def test_retry_after_follows_the_service_rate(
        self, monkeypatch: pytest.MonkeyPatch, start: Start
    ) -> None:
        now = 1000.0
        monkeypatch.setattr(model_queue, "perf_counter", lambda: now)
        one = start(max_in_flight=1, max_waiting=4)

        async def retry_after() -> int | None:
            await run_pending_tasks()
            with pytest.raises(EngineOverloaded) as caught:
                await one.admission.acquire("demo", "a")
            return caught.value.retry_after_s

        for name in "abcde":
            one.ask(name)
        assert await retry_after() == 1
        now += 10
        for ends, comes in ("af", "bg"):
            await one.finish(ends)
            one.ask(comes)
        assert await retry_after() == 20  # four wait, and two went in ten seconds
        for name in "cdefg":
            await one.finish(name)
        now += 1000
        for name in "hijkl":
            one.ask(name)
        await run_pending_tasks()
        now += 5
        assert await retry_after() == 20  # as if the first went now; an idle period does not count

    async def test_without_a_queue_the_limit_refuses(self, start: Start) -> None:
        one = start(max_in_flight=1, max_waiting=0)
        with at_once(one.admission.acquire("demo", "a")):
            with pytest.raises(EngineOverloaded) as caught:
                await one.admission.acquire("demo", "a")
            assert caught.value.retry_after_s == 1
        with at_once(one.admission.acquire("demo", "a")):
            pass

    async def test_timeout_in_the_queue_frees_the_place(self, start: Start) -> None:
        one = start(max_in_flight=1, max_waiting=1, timeout_s=0.01)
        one.ask("runs")
        late = one.ask("waits")
        with pytest.raises(
            EngineOverloaded, match=r"became free within 0.01 s; try again in \d+ s"
        ):
            await late
        assert one.admission.waiting == 0
        assert one.gauge("gateway_queue_depth") == 0
        assert one.gauge("gateway_queue_wait_seconds_count") == 1
        await one.finish("runs")
        assert one.begun == ["runs"]

    async def test_slot_granted_when_the_timeout_is_due_is_kept(self, start: Start) -> None:
        one = start(max_in_flight=1, timeout_s=0.1)
        held = at_once(one.admission.acquire("demo", "a"))
        one.ask("waits")
        await run_pending_tasks()
        time.sleep(0.11)  # of the whole loop: the timeout is due, and runs behind what follows
        with held:
            pass
        await run_pending_tasks()
        assert one.begun == ["waits"]

    async def test_slot_granted_right_after_the_timeout_goes_to_the_next(
        self, start: Start
    ) -> None:
        one = start(max_in_flight=1, timeout_s=0.005)
        held = at_once(one.admission.acquire("demo", "a"))
        late = one.ask("late")
        await run_pending_tasks()
        loop = asyncio.get_running_loop()

        def release_and_ask() -> None:
            with held:
                pass

        # Both timers are due in one turn of the loop, before the task that waited runs.
        loop.call_later(0.005, release_and_ask)
        time.sleep(0.02)
        one.ask("next")
        with pytest.raises(EngineOverloaded):
            await late
        await run_pending_tasks()
        assert one.begun == ["next"]


class TestCancellation:
    async def test_cancellation_while_queued_frees_the_place_at_once(self, start: Start) -> None:
        one = start(max_in_flight=1, max_waiting=1)
        one.ask("runs")
        gone = one.ask("gone")
        await run_pending_tasks()
        gone.cancel()
        await run_pending_tasks(1)
        assert one.admission.waiting == 0
        one.ask("takes its place")
        await run_pending_tasks()
        await one.finish("runs")
        assert one.begun == ["runs", "takes its place"]

    @pytest.mark.parametrize("after", range(6))
    @pytest.mark.parametrize("first", ["release", "cancel"])
    async def test_a_slot_is_never_lost_between_release_and_cancellation(
        self, first: str, after: int, start: Start
    ) -> None:
        one = start(max_in_flight=1)
        held = at_once(one.admission.acquire("demo", "a"))
        gone = one.ask("gone")
        one.ask("next")
        await run_pending_tasks()

        def release() -> None:
            with held:
                pass

        steps: list[Callable[[], object]] = [release, gone.cancel]
        for step in steps if first == "release" else reversed(steps):
            step()
            await run_pending_tasks(after)
        await run_pending_tasks()
        assert one.begun[-1] == "next"
        assert one.admission.in_flight == 1
        assert gone.cancelled()

    @pytest.mark.parametrize("after", range(6))
    async def test_slot_is_free_after_all_waiting_requests_are_canceled(
        self, after: int, start: Start
    ) -> None:
        one = start(max_in_flight=1)
        held = at_once(one.admission.acquire("demo", "a"))
        gone = [one.ask(f"gone-{number}") for number in range(3)]
        await run_pending_tasks()
        with held:
            pass
        await run_pending_tasks(after)
        for task in gone:
            task.cancel()
        await run_pending_tasks()
        assert one.admission.in_flight == 0
        with at_once(one.admission.acquire("demo", "a")):
            pass

    async def test_slot_skips_requests_canceled_in_the_same_turn(self, start: Start) -> None:
        one = start(max_in_flight=1)
        held = at_once(one.admission.acquire("demo", "a"))
        gone = [one.ask(f"gone-{number}") for number in range(5)]
        one.ask("stays")
        await run_pending_tasks()
        gone[1].cancel()
        with held:
            pass
        for task in (gone[0], gone[2], gone[4], gone[3]):
            task.cancel()
        await run_pending_tasks()
        assert one.begun == ["stays"]

    async def test_canceled_request_costs_its_key_nothing(self, start: Start) -> None:
        one = start(max_in_flight=1)
        held = at_once(one.admission.acquire("demo", "a"))
        huge = one.ask("huge", "a", 0, 1.0, 1_000_000)
        for name in ("a1", "b1", "a2", "b2"):
            one.ask(name, name[0], 0, 1.0, 100)
        await run_pending_tasks()
        huge.cancel()
        with held:
            pass
        await run_pending_tasks()
        for _ in range(3):
            await one.finish(one.begun[-1])
        assert one.begun == ["a1", "b1", "a2", "b2"]

    async def test_canceled_running_request_passes_its_slot_on(self, start: Start) -> None:
        one = start(max_in_flight=1)
        runs = one.ask("runs")
        one.ask("next")
        await run_pending_tasks()
        runs.cancel()
        await run_pending_tasks()
        assert one.begun == ["runs", "next"]

    async def test_waiting_request_leaves_no_garbage(self) -> None:
        def kept() -> int:
            gc.collect()
            kinds = QueueEntry, asyncio.Future
            return sum(type(one) in kinds for one in gc.get_objects())

        gc.collect()
        gc.freeze()  # what there is already is not looked at again
        before = kept()
        one = scenario(max_in_flight=1, timeout_s=3600)
        for name in "abc":
            one.ask(name)
        await run_pending_tasks()
        one.tasks["b"].cancel()
        await one.close()
        one.tasks.clear()  # a canceled one holds on to its stack
        await run_pending_tasks()
        assert kept() <= before

    async def test_closing_a_waiting_coroutine_leaves_nothing(self, start: Start) -> None:
        one = start(max_in_flight=1)
        with at_once(one.admission.acquire("demo", "a")):
            waiting = one.admission.acquire("demo", "b")
            next(waiting.__await__())
            waiting.close()
            assert one.admission.waiting == 0


class TestCapacity:
    async def test_limit_applies_per_ready_engine(self, start: Start) -> None:
        one = start(ready=3, max_in_flight=2)
        for number in range(8):
            one.ask(str(number))
        await run_pending_tasks()
        assert len(one.begun) == 6

    async def test_without_a_ready_engine_the_limit_is_that_of_one(self, start: Start) -> None:
        one = start(ready=0, max_in_flight=2)
        for number in range(5):
            one.ask(str(number))
        await run_pending_tasks()
        assert len(one.begun) == 2
        await one.finish("0")
        assert len(one.begun) == 3

    async def test_lost_engine_reduces_the_limit(self, start: Start) -> None:
        one = start(ready=2, max_in_flight=1)
        for name in ("a", "b", "c"):
            one.ask(name)
        await run_pending_tasks()
        one.ready[0] = 1
        await one.finish("a")
        assert one.begun == ["a", "b"]
        await one.finish("b")
        assert one.begun == ["a", "b", "c"]

    async def test_new_request_notices_a_new_ready_engine(self, start: Start) -> None:
        one = start(max_in_flight=1)
        for name in ("a", "b", "c"):
            one.ask(name)
        await run_pending_tasks()
        one.ready[0] = 3
        one.ask("d")
        await run_pending_tasks()
        assert one.begun == ["a", "b", "c"]
        one.ready[0] = 9
        with at_once(one.admission.acquire("demo", "e")):
            await run_pending_tasks()
            assert one.begun == ["a", "b", "c", "d"]

    async def test_engine_that_becomes_ready_admits_waiting_requests(self, start: Start) -> None:
        one = start(max_in_flight=1)
        for name in ("a", "b", "c"):
            one.ask(name)
        await run_pending_tasks()
        for ready in (2, 3):
            one.ready[0] = ready
            one.engine_changes.notify()
            await run_pending_tasks()
            assert one.begun == ["a", "b", "c"][:ready]

    async def test_engines_are_watched_only_while_a_request_waits(self, start: Start) -> None:
        one = start(max_in_flight=1)
        one.ask("a")
        await run_pending_tasks()
        assert not one.engine_changes._waiters
        one.ask("b")
        one.ask("c")
        await run_pending_tasks()
        assert len(one.engine_changes._waiters) == 1
        one.tasks["b"].cancel()
        await one.finish("a")
        assert one.begun == ["a", "c"]
        assert not one.engine_changes._waiters

    async def test_engines_are_watched_once_if_the_queue_empties_and_fills_at_a_change(
        self, start: Start
    ) -> None:
        one = start(max_in_flight=1)
        one.ask("a")
        one.ask("b")
        await run_pending_tasks()
        one.tasks["b"].cancel()
        one.ask("c")
        one.engine_changes.notify()
        await run_pending_tasks()
        assert one.admission.waiting == 1
        assert len(one.engine_changes._waiters) == 1
        await one.finish("a")
        assert one.begun == ["a", "c"]
        assert not one.engine_changes._waiters


class TestDrain:
    async def test_drain_refuses_new_requests_and_serves_waiting_ones(self, start: Start) -> None:
        one = start(max_in_flight=1)
        one.ask("runs")
        one.ask("waits")
        await run_pending_tasks()
        one.admission.drain()
        assert one.admission.draining
        with pytest.raises(EngineUnavailable):
            await one.admission.acquire("demo", "late")
        with pytest.raises(EngineUnavailable):
            await one.admission.acquire(None, "late")
        await one.finish("runs")
        assert one.begun == ["runs", "waits"]

    async def test_idle_after_the_last_waiting_request_has_ended(self, start: Start) -> None:
        one = start(max_in_flight=1)
        for name in ("a", "b", "c"):
            one.ask(name)
        await run_pending_tasks()
        one.admission.drain()
        idle = asyncio.create_task(one.admission.wait_until_idle())
        for name in ("a", "b"):
            await one.finish(name)
            assert not idle.done()
        await one.finish("c")
        assert idle.done()

    async def test_idle_when_every_model_is_idle(self, start: Start) -> None:
        one = start(max_in_flight=1)
        one.ask("a")
        one.ask("b", model="other")
        one.ask("c", model=None)
        await run_pending_tasks()
        idle = asyncio.create_task(one.admission.wait_until_idle())
        for name in ("b", "a"):
            await one.finish(name)
            assert not idle.done()
        await one.finish("c")
        assert idle.done()
        await one.close()


STEP = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 3)),
    st.tuples(st.just("ask"), st.integers(0, 3)),
    st.tuples(st.just("end"), st.integers(0, 50)),
    st.tuples(st.just("cancel"), st.integers(0, 50)),
    st.tuples(st.just("turn"), st.integers(1, 3)),
    st.tuples(st.just("ready"), st.integers(0, 3)),
)


@given(steps=st.lists(STEP, max_size=60), bound=st.integers(1, 3))
def test_no_slot_is_lost_or_given_twice_in_any_order_of_events(
    steps: list[tuple[str, int]], bound: int
) -> None:
    async def play() -> None:
        one = scenario(max_in_flight=bound)
        most = bound
        for number, (what, argument) in enumerate(steps):
            tasks = list(one.tasks)
            if what == "ask":
                one.ask(str(number), f"key-{argument}", argument % 2, 1.0, 10 * argument)
            elif what == "ready":
                one.ready[0] = argument
                most = max(most, bound * argument)
            elif what == "turn":
                await run_pending_tasks(argument)
            elif tasks and what == "end":
                one.end(tasks[argument % len(tasks)])
            elif tasks:
                one.tasks[tasks[argument % len(tasks)]].cancel()
            assert one.admission.in_flight <= most
        await run_pending_tasks()
        one.ready[0] = 1
        # No request waits while a slot is free, and none runs without a slot.
        running = sum(name in one.begun and not task.done() for name, task in one.tasks.items())
        assert one.admission.in_flight == running
        if one.admission.waiting:
            assert running >= bound
        waiting = [name for name, task in one.tasks.items() if not task.done()]
        await one.close()
        assert set(waiting) <= set(one.begun)
        assert len(one.begun) == len(set(one.begun))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


async def test_raised_limit_grants_slots_at_once(start: Start) -> None:
    one = start(max_in_flight=1)
    with at_once(one.admission.acquire("demo", "a")):
        one.ask("b")
        one.ask("c")
        await run_pending_tasks()
        one.admission.open("demo", QueueSettings(max_in_flight=2))
        await run_pending_tasks()
        assert one.begun == ["b"]
        one.admission.open("demo", QueueSettings())
        await run_pending_tasks()
        assert one.begun == ["b", "c"]


async def test_lowered_queue_limit_keeps_waiting_requests(start: Start) -> None:
    one = start(max_in_flight=1)
    with at_once(one.admission.acquire("demo", "a")):
        one.ask("b")
        await run_pending_tasks()
        one.admission.open("demo", QueueSettings(max_in_flight=1, max_waiting=0))
        with pytest.raises(EngineOverloaded):
            await one.admission.acquire("demo", "c")
        assert one.admission.waiting == 1
    await run_pending_tasks()
    assert one.begun == ["b"]


async def test_new_model_has_its_own_queue(start: Start) -> None:
    one = start()
    one.admission.open("new", QueueSettings(max_in_flight=1))
    with at_once(one.admission.acquire("new", "a")):
        assert one.admission.in_flight == 1


async def test_removed_model_is_not_found_and_its_requests_are_counted_to_their_end(
    start: Start,
) -> None:
    one = start()
    with at_once(one.admission.acquire("demo", "a")):
        one.admission.close("demo")
        with pytest.raises(ModelNotFound):
            await one.admission.acquire("demo", "b")
        assert one.admission.in_flight == 1
        one.admission.close("other")
        assert one.admission.in_flight == 1
        idle = asyncio.create_task(one.admission.wait_until_idle())
        await run_pending_tasks()
        assert not idle.done()
    await run_pending_tasks()
    assert idle.done()
    assert one.admission.in_flight == 0


async def test_model_is_idle_when_none_is_in_flight_or_waits(start: Start) -> None:
    one = start(max_in_flight=1)
    await one.admission.wait_until_idle("demo")
    first = one.ask("a")
    await run_pending_tasks()
    idle = asyncio.create_task(one.admission.wait_until_idle("demo"))
    one.ask("b")
    await run_pending_tasks()
    await one.finish("a")
    assert first.done()
    assert not idle.done()
    await one.finish("b")
    assert idle.done()
