"""Streams of on-demand models that give way to others, or whose engines are replaced."""

import asyncio
from typing import Any

import pytest

from app.errors import EngineOverloaded, EngineUnavailable
from app.residency import OnDemandModel, model_loads
from app.residency.policy import LoadTerms, ModelSnapshot, Residency, away_s
from engines.base import EngineState
from tests.app.residency.engines import FakeEngine
from tests.app.residency.test_loader import Scenario, StartLoader, closed, on_demand, start
from tests.waiting import run_pending_tasks, wait_until

__all__ = ["start"]  # a fixture

TERMS = LoadTerms(patience_s=15, keep_s=10, keep_loads=2)


# The model of the streams is `s`: of two that are wanted at the same moment `b` is first.


class Streams:
    """The streams of a model: requests that hold a lease, and take another when moved."""

    def __init__(self) -> None:
        self.scene: Scenario
        self.running: dict[str, asyncio.Event] = {}
        self.moved: list[str] = []
        self.again: list[str] = []  # in the order in which they went on

    def move(self) -> int:
        names = list(self.running)
        for name in names:
            self.moved.append(name)
            self.running.pop(name).set()
        return len(names)

    async def run(self, name: str, model: str = "s", wait_s: float = 10.0) -> None:
        """Run a stream until it is moved, and then to its end after the next load."""
        with await self.scene.loader.lease(model):
            self.running[name] = moved = asyncio.Event()
            await moved.wait()
        with await self.scene.loader.lease(model, bound_s=wait_s, resumed=True):
            self.again.append(name)

    def model(self, *engines: FakeEngine, **fields: Any) -> OnDemandModel:
        one = on_demand(*engines, **fields)
        return OnDemandModel(one.settings, one.engines, self.move)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    monkeypatch.setattr(model_loads, "MOVE_POLL_S", 0.01)
    return Streams()


async def begin(streams: Streams, scene: Scenario, *names: str) -> list[asyncio.Task[None]]:
    """Begin streams of the model s, after every other model was loaded once."""
    streams.scene = scene
    for snapshot in scene.loader.snapshots():
        if snapshot.name != "s":
            await scene.loader.load(snapshot.name)
    tasks = [asyncio.create_task(streams.run(name)) for name in names]
    await wait_until(lambda: len(streams.running) == len(names))
    return tasks


class TestGivingWay:
    async def test_streams_wait_for_the_next_load(
        self, start: StartLoader, streams: Streams
    ) -> None:
        s, b = FakeEngine("s"), FakeEngine("b")
        scene = start(streams.model(s), on_demand(b), budget_gib=1.5)
        tasks = await begin(streams, scene, "one", "two")
        with await scene.loader.lease("b"):
            assert (s.state, b.state) == (EngineState.STOPPED, EngineState.READY)
            assert sorted(streams.moved) == ["one", "two"]
            await scene.until_waiting(2)
            assert streams.again == []
        await asyncio.gather(*tasks)
        assert sorted(streams.again) == ["one", "two"]
        assert (s.starts, s.unloads) == (2, 1)
        assert scene.of("s").leases == 0
        assert scene.metric("gateway_model_evictions_total", model="s", reason="room") == 1

    async def test_stream_that_begins_while_the_model_drains_moves_as_well(
        self, start: StartLoader, streams: Streams
    ) -> None:
        s, b = FakeEngine("s"), FakeEngine("b")
        scene = start(streams.model(s), on_demand(b), budget_gib=1.5)
        [first] = await begin(streams, scene, "one")
        with await scene.loader.lease("s"):  # a request whose answer has not begun
            waits = scene.ask("b")
            await wait_until(lambda: streams.moved == ["one"])
            late = streams.running["late"] = asyncio.Event()
            await late.wait()
            assert not waits.done()
        with await waits:
            assert streams.moved == ["one", "late"]
        await first

    async def test_eviction_that_is_called_off_leaves_the_model_to_its_streams(
        self, start: StartLoader, streams: Streams
    ) -> None:
        s, b = FakeEngine("s"), FakeEngine("b")
        scene = start(streams.model(s), on_demand(b), budget_gib=1.5)
        [stream] = await begin(streams, scene, "one")
        with await scene.loader.lease("s"):
            waits = scene.ask("b")
            await wait_until(lambda: streams.moved)
            waits.cancel()
            await stream
        assert (s.starts, s.unloads) == (1, 0)

    async def test_canceled_stream_leaves_no_lease_and_no_demand(
        self, start: StartLoader, streams: Streams
    ) -> None:
        s, b = FakeEngine("s"), FakeEngine("b")
        scene = start(streams.model(s), on_demand(b), budget_gib=1.5)
        [stream] = await begin(streams, scene, "one")
        with await scene.loader.lease("b"):
            await scene.until_waiting(1)
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
            assert (scene.of("s").leases, scene.of("s").waiting) == (0, 0)
        await run_pending_tasks()
        assert s.starts == 1

    async def test_two_models_in_use_take_turns(self, start: StartLoader, streams: Streams) -> None:
        s, b, others = FakeEngine("s"), FakeEngine("b"), Streams()
        scene = start(streams.model(s), others.model(b), budget_gib=1.5)
        others.scene = scene
        [first] = await begin(streams, scene, "one")
        second = asyncio.create_task(others.run("two", "b"))
        await asyncio.gather(first, second)
        assert (streams.moved, others.moved) == (["one"], ["two"])
        assert (streams.again, others.again) == (["one"], ["two"])


class TestStaying:
    async def check_stays(self, scene: Scenario, streams: Streams) -> None:
        """Check that a stream finishes before the other model is loaded."""
        streams.scene = scene
        stream = asyncio.create_task(streams.run("one"))
        await wait_until(lambda: streams.running)
        waits = scene.ask("b")
        await scene.until_waiting(1)
        await run_pending_tasks()
        assert streams.moved == []
        streams.move()
        with await waits:
            pass
        await stream

    async def test_continuation_is_off(self, start: StartLoader, streams: Streams) -> None:
        off = streams.model(FakeEngine("s"), continuation="off")
        scene = start(off, on_demand(FakeEngine("b")), budget_gib=1.5)
        await scene.loader.load("b")
        await self.check_stays(scene, streams)

    async def test_load_time_of_the_other_model_is_unknown(
        self, start: StartLoader, streams: Streams
    ) -> None:
        model = streams.model(FakeEngine("s"))
        await self.check_stays(start(model, on_demand(FakeEngine("b")), budget_gib=1.5), streams)

    async def test_turn_of_the_other_model_is_longer_than_a_stream_waits(
        self, start: StartLoader, streams: Streams
    ) -> None:
        terms = LoadTerms(patience_s=0, keep_s=20, keep_loads=0, idle_after_s=0, idle_after_loads=0)
        model = streams.model(FakeEngine("s"), continuation_wait_s=15)
        scene = start(model, on_demand(FakeEngine("b")), budget_gib=1.5, terms=terms)
        await scene.loader.load("b")
        streams.scene = scene
        stream = asyncio.create_task(streams.run("one"))
        await wait_until(lambda: streams.running)
        scene.loader._states["s"].loaded_at -= 20
        waits = scene.ask("b")
        await scene.until_waiting(1)
        await run_pending_tasks()
        assert scene.loader._states["s"].draining
        assert streams.moved == []
        streams.move()
        with await waits:
            pass
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)

    async def test_operator_unloads_it(self, start: StartLoader, streams: Streams) -> None:
        s = FakeEngine("s")
        scene = start(streams.model(s), on_demand(FakeEngine("b")), budget_gib=1.5)
        [stream] = await begin(streams, scene, "one")
        unloading = asyncio.create_task(scene.loader.unload("s"))
        await wait_until(lambda: scene.loader._states["s"].draining)
        await run_pending_tasks()
        assert streams.moved == []
        streams.move()
        await asyncio.gather(unloading, stream)


def lent(name: str, load_s: float | None = 5.0, **fields: Any) -> ModelSnapshot:
    return ModelSnapshot(name=name, load_s=load_s, **fields)


class TestAbsence:
    """For how long a model that gives way is away."""

    def test_turn_of_the_other_and_the_own_load(self) -> None:
        a, b = lent("a", 5.0, leases=1), lent("b", 20.0, wanted_since=1.0)
        assert away_s(a, (a, b), TERMS) == 20 + 40 + 5

    def test_every_model_that_is_wanted_or_loading_counts(self) -> None:
        a, b = lent("a", 5.0), lent("b", 2.0, wanted_since=1.0)
        c = lent("c", 3.0, residency=Residency.LOADING)
        idle = lent("d", 100.0, residency=Residency.LOADED)
        assert away_s(a, (a, b, c, idle), TERMS) == (2 + 10) + (3 + 10) + 5

    def test_model_is_not_loaded_again_before_its_patience(self) -> None:
        a, b = lent("a", 1.0), lent("b", 1.0, wanted_since=1.0)
        assert away_s(a, (a, b), TERMS) == 15 + 1

    @pytest.mark.parametrize(("own", "other"), [(None, 1.0), (1.0, None)])
    def test_unknown_load_time(self, own: float | None, other: float | None) -> None:
        a, b = lent("a", own), lent("b", other, wanted_since=1.0)
        assert away_s(a, (a, b), TERMS) is None


class TestResumedLease:
    async def test_is_not_refused_for_the_queue_and_waits_as_long_as_it_may(
        self, start: StartLoader
    ) -> None:
        engine = closed("a")
        scene = start(on_demand(engine, queue={"max_waiting": 0}, load_wait_s=0.01))
        resumed = asyncio.create_task(scene.loader.lease("a", bound_s=10.0, resumed=True))
        await scene.until_waiting(1)
        with pytest.raises(EngineOverloaded):
            await scene.loader.lease("a")
        await asyncio.sleep(0.02)
        assert not resumed.done()
        engine.gate.set()
        with await resumed:
            assert scene.of("a").leases == 1

    async def test_ends_after_its_own_bound(self, start: StartLoader) -> None:
        scene = start(on_demand(closed("a")))
        with pytest.raises(EngineOverloaded, match=r"was not loaded within 0\.01 s"):
            await scene.loader.lease("a", bound_s=0.01, resumed=True)

    async def test_model_that_cannot_be_loaded_refuses_it(self, start: StartLoader) -> None:
        scene = start(on_demand(FakeEngine("a", fault="no room")))
        with pytest.raises(EngineUnavailable, match="could not be loaded"):
            await scene.loader.lease("a", bound_s=10.0, resumed=True)


class TestHeld:
    """While the engines of a model are being replaced."""

    async def test_requests_wait_and_nothing_is_loaded(self, start: StartLoader) -> None:
        old, new = FakeEngine("a"), FakeEngine("a")
        scene = start(on_demand(old))
        scene.loader.replace([_held(old)])
        waits = scene.ask("a")
        await scene.until_waiting(1)
        await run_pending_tasks()
        assert old.starts == 0
        scene.loader.replace([_held(new)])
        await run_pending_tasks()
        assert (new.starts, scene.loader.waiting) == (0, 1)
        scene.loader.replace([on_demand(new)])
        with await waits:
            assert (old.starts, new.starts) == (0, 1)

    async def test_unloaded_model_is_not_loaded_again_for_those_that_wait(
        self, start: StartLoader
    ) -> None:
        engine = FakeEngine("a")
        scene = start(on_demand(engine))
        with await scene.loader.lease("a"):
            scene.loader.replace([_held(engine)])
            unloading = asyncio.create_task(scene.loader.unload("a"))
            await wait_until(lambda: scene.loader._states["a"].draining)
            waits = scene.ask("a")
            await scene.until_waiting(1)
        await unloading
        await run_pending_tasks()
        assert (engine.state, engine.starts) == (EngineState.STOPPED, 1)
        scene.loader.replace([on_demand(engine)])
        with await waits:
            assert engine.starts == 2

    async def test_held_model_takes_no_memory_from_others(self, start: StartLoader) -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        scene = start(_held(a), on_demand(b), budget_gib=1.0)
        waits = scene.ask("a")
        await scene.until_waiting(1)
        with await scene.loader.lease("b"):
            assert b.state is EngineState.READY
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)


def _held(engine: FakeEngine) -> OnDemandModel:
    return OnDemandModel(on_demand(engine).settings, (engine,), held=True)


@pytest.mark.parametrize("state", [EngineState.STOPPED, EngineState.STARTING])
async def test_restart_by_an_operator_is_no_death_of_the_model(
    start: StartLoader, state: EngineState
) -> None:
    """Its moved streams want it while its engine is not READY again."""
    engine = FakeEngine("a")
    scene = start(on_demand(engine))
    for _ in range(3):
        with await scene.loader.lease("a"):
            pass
        engine.state = state
        asyncio.get_running_loop().call_soon(setattr, engine, "state", EngineState.STOPPED)
    with await scene.loader.lease("a"):
        assert scene.loader._states["a"].failures == 0


async def test_restart_after_a_failure_is_a_death_of_the_model(start: StartLoader) -> None:
    engine = FakeEngine("a")
    scene = start(on_demand(engine))
    with await scene.loader.lease("a"):
        pass
    engine.state, engine.restarts = EngineState.STOPPED, 1  # before it starts by itself
    with await scene.loader.lease("a"):
        assert scene.loader._states["a"].failures == 1
