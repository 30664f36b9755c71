"""Permits: at once, after a wait, or not at all; and no slot lost or given twice.

What must have happened has, once every task that can run has run: no test waits for time to pass.
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

from app.admission import model_queue as lane_module
from app.admission.admission import Admission, Permit
from app.admission.fair_queue import Place
from app.errors import EngineOverloaded, EngineUnavailable, ModelNotFound
from app.settings import QueueSettings
from app.telemetry.metrics import Metrics
from engines.base import ChangeNotifier

PATIENCE_S = 20.0
# More turns of the loop than anything here takes to come to rest.
TURNS = 12


@pytest.fixture(autouse=True)
async def calm() -> AsyncIterator[None]:
    """No callback on the loop may fail."""
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    yield
    assert faults == []


async def turns(count: int = TURNS) -> None:
    """Let the loop go round so often."""
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass(eq=False)
class Room:
    """An admission for the model "demo", and the requests that a test has made."""

    admission: Admission
    metrics: Metrics
    ready: list[int]  # how many engines are READY, to be changed
    engine_changes: ChangeNotifier
    begun: list[str] = field(default_factory=list)
    _ends: dict[str, asyncio.Event] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[float | None]] = field(default_factory=dict)

    def ask(self, name: str, *claim: Any, model: str | None = "demo") -> asyncio.Task[float | None]:
        """Have a request ask for a permit; it ends when it is told to."""
        self._ends[name] = asyncio.Event()
        task = asyncio.create_task(self._run(name, claim or (name,), model))
        self.tasks[name] = task
        return task

    async def _run(self, name: str, claim: tuple[Any, ...], model: str | None) -> float | None:
        with await self.admission.permit(model, *claim) as permit:
            self.begun.append(name)
            await self._ends[name].wait()
            return permit.waited_s

    def end(self, name: str) -> None:
        """Have a request end, at the next turn of the loop."""
        self._ends[name].set()

    async def over(self, name: str) -> None:
        """Have a request end, and see what follows from that."""
        self.end(name)
        await turns()

    async def close(self) -> None:
        """End what runs and waits; nothing may be left."""
        for end in self._ends.values():
            end.set()
        if self.tasks:
            await asyncio.wait(self.tasks.values())
        assert self.admission.in_flight == 0
        assert self.admission.waiting == 0
        assert self.gauge("gateway_queue_depth") == 0
        assert self.gauge("gateway_requests_in_flight") == 0
        async with asyncio.timeout(PATIENCE_S):
            await self.admission.idle()

    def gauge(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"model": "demo"}) or 0.0


def room(ready: int = 1, **queue: Any) -> Room:
    metrics = Metrics()
    engines = [ready]
    queues = {"demo": QueueSettings(**queue), "other": QueueSettings(max_in_flight=1)}
    changes = ChangeNotifier()
    admission = Admission(metrics, queues, lambda _: engines[0], changes)
    metrics.watch_in_flight(admission.in_flight_by_model)
    return Room(admission, metrics, engines, changes)


def at_once(permit: Awaitable[Permit]) -> Permit:
    """Return the permit that is to be had without a turn of the loop."""
    with pytest.raises(StopIteration) as stop:
        next(permit.__await__())
    result: Permit = stop.value.value
    return result


async def test_without_a_bound_nobody_waits() -> None:
    one = room()
    held = [at_once(one.admission.permit("demo", "a")) for _ in range(1000)]
    assert {permit.waited_s for permit in held} == {None}
    assert one.admission.in_flight == one.gauge("gateway_requests_in_flight") == 1000
    for permit in held:
        with permit:
            pass
    await one.close()


async def test_who_finds_room_is_let_in_without_a_turn_of_the_loop() -> None:
    one = room(max_in_flight=2)
    with at_once(one.admission.permit("demo", "a")), at_once(one.admission.permit("demo", "b")):
        assert one.admission.in_flight == 2
        one.ask("c")
        await turns()
        assert one.admission.waiting == one.gauge("gateway_queue_depth") == 1
    await turns()
    assert one.begun == ["c"]
    await one.close()


async def test_a_request_that_fails_gives_its_slot_back() -> None:
    one = room(max_in_flight=1)
    with pytest.raises(ZeroDivisionError), at_once(one.admission.permit("demo", "a")):
        raise ZeroDivisionError
    await one.close()


async def test_a_request_without_a_model_never_waits() -> None:
    one = room(max_in_flight=1)
    with at_once(one.admission.permit("demo", "a")):
        held = [at_once(one.admission.permit(None, "a")) for _ in range(100)]
        assert one.admission.in_flight == 101
        for permit in held:
            with permit:
                pass
    await one.close()


async def test_models_do_not_wait_for_each_other() -> None:
    one = room(max_in_flight=1)
    with at_once(one.admission.permit("demo", "a")), at_once(one.admission.permit("other", "a")):
        pass
    await one.close()


async def test_who_waited_is_told_how_long_and_who_did_not_nothing() -> None:
    one = room(max_in_flight=1)
    first, second = one.ask("a"), one.ask("b")
    await turns()
    await one.over("a")
    await one.over("b")
    assert await first is None
    waited_s = await second
    assert waited_s is not None
    assert waited_s >= 0
    assert one.gauge("gateway_queue_wait_seconds_count") == 1
    await one.close()


class TestOrder:
    async def test_keys_take_turns(self) -> None:
        one = room(max_in_flight=1)
        one.ask("holder")
        for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
            one.ask(name, name[0])
        await turns()
        while one.begun != (before := list(one.begun)) or len(before) < 7:
            await one.over(before[-1])
        assert one.begun == ["holder", "a1", "b1", "c1", "a2", "c2", "a3"]
        await one.close()

    async def test_priority_weight_and_tokens_say_who_is_next(self) -> None:
        one = room(max_in_flight=1)
        one.ask("holder")
        for number in range(3):
            one.ask(f"behind-{number}", "z", 1, 1.0, 10)
            one.ask(f"huge-{number}", "h", 0, 1.0, 1000)
            one.ask(f"heavy-{number}", "w", 0, 4.0, 1000)
            one.ask(f"small-{number}", "s", 0, 1.0, 100)
        await turns()
        for _ in range(12):
            await one.over(one.begun[-1])
        names = [name for name in one.begun if not name.startswith("behind")]
        assert names[:6] == ["holder", "huge-0", "heavy-0", "small-0", "small-1", "small-2"]
        assert names[6:] == ["heavy-1", "heavy-2", "huge-1", "huge-2"]
        await one.close()

    async def test_nobody_overtakes_those_who_wait(self) -> None:
        one = room(max_in_flight=1)
        held = at_once(one.admission.permit("demo", "a"))
        one.ask("waits")
        await turns()
        with held:
            pass
        # The slot is handed on already, though the one who has it did not run yet.
        one.ask("late")
        await turns()
        assert one.begun == ["waits"]
        await one.close()


class TestRefusal:
    async def test_a_full_queue_refuses_at_once(self) -> None:
        one = room(max_in_flight=1, max_waiting=2)
        for name in ("runs", "waits-1", "waits-2"):
            one.ask(name)
        await turns()
        with pytest.raises(EngineOverloaded) as caught:
            next(one.admission.permit("demo", "a").__await__())
        told = caught.value
        assert told.retry_after_s is not None
        assert 1 <= told.retry_after_s <= 60
        assert told.message.startswith("the model 'demo' has as many requests under way and wait")
        assert told.message.endswith(f"; try again in {told.retry_after_s} s")
        await one.over("runs")
        one.ask("finds a place")
        await turns()
        assert one.admission.waiting == 2
        await one.close()

    async def test_when_to_come_back_follows_from_how_fast_the_queue_moves(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 1000.0
        monkeypatch.setattr(lane_module, "perf_counter", lambda: now)
        one = room(max_in_flight=1, max_waiting=4)

        async def told() -> int | None:
            await turns()
            with pytest.raises(EngineOverloaded) as caught:
                await one.admission.permit("demo", "a")
            return caught.value.retry_after_s

        for name in "abcde":
            one.ask(name)
        assert await told() == 1
        now += 10
        for ends, comes in ("af", "bg"):
            await one.over(ends)
            one.ask(comes)
        assert await told() == 20  # four wait, and two went in ten seconds
        for name in "cdefg":
            await one.over(name)
        now += 1000
        for name in "hijkl":
            one.ask(name)
        await turns()
        now += 5
        assert await told() == 20  # as if the first went now; when nobody waited says nothing
        await one.close()

    async def test_without_places_to_wait_the_bound_refuses(self) -> None:
        one = room(max_in_flight=1, max_waiting=0)
        with at_once(one.admission.permit("demo", "a")):
            with pytest.raises(EngineOverloaded) as caught:
                await one.admission.permit("demo", "a")
            assert caught.value.retry_after_s == 1
        with at_once(one.admission.permit("demo", "a")):
            pass
        await one.close()

    async def test_who_waits_too_long_is_refused_and_its_place_is_free(self) -> None:
        one = room(max_in_flight=1, max_waiting=1, timeout_s=0.01)
        one.ask("runs")
        late = one.ask("waits")
        with pytest.raises(EngineOverloaded, match=r"no room .* within 0.01 s; try again in \d+ s"):
            await late
        assert one.admission.waiting == 0
        assert one.gauge("gateway_queue_depth") == 0
        assert one.gauge("gateway_queue_wait_seconds_count") == 1
        await one.over("runs")
        assert one.begun == ["runs"]
        await one.close()

    async def test_a_slot_that_comes_with_the_timeout_due_is_kept(self) -> None:
        one = room(max_in_flight=1, timeout_s=0.1)
        held = at_once(one.admission.permit("demo", "a"))
        one.ask("waits")
        await turns()
        time.sleep(0.11)  # of the whole loop: the timeout is due, and runs behind what follows
        with held:
            pass
        await turns()
        assert one.begun == ["waits"]
        await one.close()

    async def test_a_slot_that_comes_right_after_the_timeout_goes_to_the_next(self) -> None:
        one = room(max_in_flight=1, timeout_s=0.005)
        held = at_once(one.admission.permit("demo", "a"))
        late = one.ask("late")
        await turns()
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
        await turns()
        assert one.begun == ["next"]
        await one.close()


class TestCancellation:
    async def test_who_leaves_the_queue_frees_its_place_at_once(self) -> None:
        one = room(max_in_flight=1, max_waiting=1)
        one.ask("runs")
        gone = one.ask("gone")
        await turns()
        gone.cancel()
        await turns(1)
        assert one.admission.waiting == 0
        one.ask("takes its place")
        await turns()
        await one.over("runs")
        assert one.begun == ["runs", "takes its place"]
        await one.close()

    @pytest.mark.parametrize("after", range(6))
    @pytest.mark.parametrize("first", ["release", "cancel"])
    async def test_a_slot_is_never_lost_between_release_and_cancellation(
        self, first: str, after: int
    ) -> None:
        one = room(max_in_flight=1)
        held = at_once(one.admission.permit("demo", "a"))
        gone = one.ask("gone")
        one.ask("next")
        await turns()

        def release() -> None:
            with held:
                pass

        steps: list[Callable[[], object]] = [release, gone.cancel]
        for step in steps if first == "release" else reversed(steps):
            step()
            await turns(after)
        await turns()
        assert one.begun[-1] == "next"
        assert one.admission.in_flight == 1
        assert gone.cancelled()
        await one.close()

    @pytest.mark.parametrize("after", range(6))
    async def test_a_slot_that_nobody_needs_is_free(self, after: int) -> None:
        one = room(max_in_flight=1)
        held = at_once(one.admission.permit("demo", "a"))
        gone = [one.ask(f"gone-{number}") for number in range(3)]
        await turns()
        with held:
            pass
        await turns(after)
        for task in gone:
            task.cancel()
        await turns()
        assert one.admission.in_flight == 0
        with at_once(one.admission.permit("demo", "a")):
            pass
        await one.close()

    async def test_a_slot_passes_all_who_leave_in_the_same_moment(self) -> None:
        one = room(max_in_flight=1)
        held = at_once(one.admission.permit("demo", "a"))
        gone = [one.ask(f"gone-{number}") for number in range(5)]
        one.ask("stays")
        await turns()
        gone[1].cancel()
        with held:
            pass
        for task in (gone[0], gone[2], gone[4], gone[3]):
            task.cancel()
        await turns()
        assert one.begun == ["stays"]
        await one.close()

    async def test_who_was_cancelled_costs_its_key_nothing(self) -> None:
        one = room(max_in_flight=1)
        held = at_once(one.admission.permit("demo", "a"))
        huge = one.ask("huge", "a", 0, 1.0, 1_000_000)
        for name in ("a1", "b1", "a2", "b2"):
            one.ask(name, name[0], 0, 1.0, 100)
        await turns()
        huge.cancel()
        with held:
            pass
        await turns()
        for _ in range(3):
            await one.over(one.begun[-1])
        assert one.begun == ["a1", "b1", "a2", "b2"]
        await one.close()

    async def test_a_cancelled_request_that_ran_gives_its_slot_to_the_next(self) -> None:
        one = room(max_in_flight=1)
        runs = one.ask("runs")
        one.ask("next")
        await turns()
        runs.cancel()
        await turns()
        assert one.begun == ["runs", "next"]
        await one.close()

    async def test_nothing_is_kept_of_who_waited(self) -> None:
        def kept() -> int:
            gc.collect()
            kinds = Place, asyncio.Future
            return sum(type(one) in kinds for one in gc.get_objects())

        before = kept()
        one = room(max_in_flight=1, timeout_s=3600)
        for name in "abc":
            one.ask(name)
        await turns()
        one.tasks["b"].cancel()
        await one.close()
        one.tasks.clear()  # a cancelled one holds on to its stack
        await turns()
        assert kept() <= before

    async def test_a_loop_that_is_closed_on_those_who_wait_is_told_nothing_bad(self) -> None:
        one = room(max_in_flight=1)
        with at_once(one.admission.permit("demo", "a")):
            waiting = one.admission.permit("demo", "b")
            next(waiting.__await__())
            waiting.close()
            assert one.admission.waiting == 0
        await one.close()


class TestCapacity:
    async def test_the_bound_is_that_of_each_engine_that_is_ready(self) -> None:
        one = room(ready=3, max_in_flight=2)
        for number in range(8):
            one.ask(str(number))
        await turns()
        assert len(one.begun) == 6
        await one.close()

    async def test_with_no_engine_up_requests_come_to_know_it_one_engines_worth_at_once(
        self,
    ) -> None:
        one = room(ready=0, max_in_flight=2)
        for number in range(5):
            one.ask(str(number))
        await turns()
        assert len(one.begun) == 2
        await one.over("0")
        assert len(one.begun) == 3
        await one.close()

    async def test_an_engine_that_goes_takes_its_room_along(self) -> None:
        one = room(ready=2, max_in_flight=1)
        for name in ("a", "b", "c"):
            one.ask(name)
        await turns()
        one.ready[0] = 1
        await one.over("a")
        assert one.begun == ["a", "b"]
        await one.over("b")
        assert one.begun == ["a", "b", "c"]
        await one.close()

    async def test_an_engine_that_comes_up_is_noticed_by_whoever_comes_next(self) -> None:
        one = room(max_in_flight=1)
        for name in ("a", "b", "c"):
            one.ask(name)
        await turns()
        one.ready[0] = 3
        one.ask("d")
        await turns()
        assert one.begun == ["a", "b", "c"]
        one.ready[0] = 9
        with at_once(one.admission.permit("demo", "e")):
            await turns()
            assert one.begun == ["a", "b", "c", "d"]
        await one.close()

    async def test_engine_that_becomes_ready_admits_waiting_requests(self) -> None:
        one = room(max_in_flight=1)
        for name in ("a", "b", "c"):
            one.ask(name)
        await turns()
        for ready in (2, 3):
            one.ready[0] = ready
            one.engine_changes.notify()
            await turns()
            assert one.begun == ["a", "b", "c"][:ready]
        await one.close()

    async def test_engines_are_watched_only_while_a_request_waits(self) -> None:
        one = room(max_in_flight=1)
        one.ask("a")
        await turns()
        assert not one.engine_changes._waiters
        one.ask("b")
        one.ask("c")
        await turns()
        assert len(one.engine_changes._waiters) == 1
        one.tasks["b"].cancel()
        await one.over("a")
        assert one.begun == ["a", "c"]
        assert not one.engine_changes._waiters
        await one.close()


class TestDrain:
    async def test_who_comes_is_refused_and_who_waits_is_served(self) -> None:
        one = room(max_in_flight=1)
        one.ask("runs")
        one.ask("waits")
        await turns()
        one.admission.drain()
        assert one.admission.draining
        with pytest.raises(EngineUnavailable):
            await one.admission.permit("demo", "late")
        with pytest.raises(EngineUnavailable):
            await one.admission.permit(None, "late")
        await one.over("runs")
        assert one.begun == ["runs", "waits"]
        await one.close()

    async def test_the_gateway_is_idle_when_the_last_who_waited_has_ended(self) -> None:
        one = room(max_in_flight=1)
        for name in ("a", "b", "c"):
            one.ask(name)
        await turns()
        one.admission.drain()
        idle = asyncio.create_task(one.admission.idle())
        for name in ("a", "b"):
            await one.over(name)
            assert not idle.done()
        await one.over("c")
        assert idle.done()
        await one.close()

    async def test_the_gateway_is_idle_when_every_model_is(self) -> None:
        one = room(max_in_flight=1)
        one.ask("a")
        one.ask("b", model="other")
        one.ask("c", model=None)
        await turns()
        idle = asyncio.create_task(one.admission.idle())
        for name in ("b", "a"):
            await one.over(name)
            assert not idle.done()
        await one.over("c")
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
def test_whatever_happens_in_one_moment_no_slot_is_lost_or_given_twice(
    steps: list[tuple[str, int]], bound: int
) -> None:
    async def play() -> None:
        one = room(max_in_flight=bound)
        most = bound
        for number, (what, argument) in enumerate(steps):
            tasks = list(one.tasks)
            if what == "ask":
                one.ask(str(number), f"key-{argument}", argument % 2, 1.0, 10 * argument)
            elif what == "ready":
                one.ready[0] = argument
                most = max(most, bound * argument)
            elif what == "turn":
                await turns(argument)
            elif tasks and what == "end":
                one.end(tasks[argument % len(tasks)])
            elif tasks:
                one.tasks[tasks[argument % len(tasks)]].cancel()
            assert one.admission.in_flight <= most
        await turns()
        one.ready[0] = 1
        # Nobody waits beside a free slot, nor does anybody run without one.
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


# Other models and other bounds, while it runs


async def test_more_room_is_handed_out_at_once() -> None:
    one = room(max_in_flight=1)
    with at_once(one.admission.permit("demo", "a")):
        one.ask("b")
        one.ask("c")
        await turns()
        one.admission.open("demo", QueueSettings(max_in_flight=2))
        await turns()
        assert one.begun == ["b"]
        one.admission.open("demo", QueueSettings())
        await turns()
        assert one.begun == ["b", "c"]
    await one.close()


async def test_who_waits_stays_when_fewer_may() -> None:
    one = room(max_in_flight=1)
    with at_once(one.admission.permit("demo", "a")):
        one.ask("b")
        await turns()
        one.admission.open("demo", QueueSettings(max_in_flight=1, max_waiting=0))
        with pytest.raises(EngineOverloaded):
            await one.admission.permit("demo", "c")
        assert one.admission.waiting == 1
    await turns()
    assert one.begun == ["b"]
    await one.close()


async def test_a_new_model_has_a_lane_of_its_own() -> None:
    one = room()
    one.admission.open("new", QueueSettings(max_in_flight=1))
    with at_once(one.admission.permit("new", "a")):
        assert one.admission.in_flight == 1
    await one.close()


async def test_a_model_that_is_gone_is_not_found_and_what_it_has_is_counted_to_its_end() -> None:
    one = room()
    with at_once(one.admission.permit("demo", "a")):
        one.admission.close("demo")
        with pytest.raises(ModelNotFound):
            await one.admission.permit("demo", "b")
        assert one.admission.in_flight == 1
        one.admission.close("other")
        assert one.admission.in_flight == 1
        idle = asyncio.create_task(one.admission.idle())
        await turns()
        assert not idle.done()
    await turns()
    assert idle.done()
    assert one.admission.in_flight == 0
    await one.close()


async def test_quiet_is_when_nobody_is_under_way_or_waits() -> None:
    one = room(max_in_flight=1)
    await one.admission.quiet("demo")
    first = one.ask("a")
    await turns()
    quiet = asyncio.create_task(one.admission.quiet("demo"))
    one.ask("b")
    await turns()
    await one.over("a")
    assert first.done()
    assert not quiet.done()
    await one.over("b")
    assert quiet.done()
    await one.close()
