"""Loading on demand: leases, waiting requests, evictions and operators, with fake engines."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any

import pytest

from app.errors import OPERATOR_S, EngineOverloaded, EngineUnavailable
from app.residency.forecast import UP, Forecast
from app.residency.loader import OnDemandLoader
from app.residency.model_lease import ModelLease
from app.residency.model_state import OnDemandModel
from app.residency.policy import LoadTerms, ModelSnapshot, Residency
from app.settings import ModelSettings
from app.telemetry.metrics import Metrics
from engines.base import EngineState
from tests.app.residency.engines import FakeEngine
from tests.waiting import wait_until

# Models are idle, and waits are urgent, at once.
AT_ONCE = LoadTerms(patience_s=0, keep_s=0, keep_loads=0, idle_after_s=0, idle_after_loads=0)
PATIENCE_S = 10.0


def on_demand(*engines: FakeEngine, name: str | None = None, **fields: Any) -> OnDemandModel:
    """Return a model with these engines; its default name is that of the first."""
    spec = {"kind": "process", "model": "m", "restart": fields.pop("restart", {})}
    settings = ModelSettings.model_validate(
        {"name": name or engines[0].name, "load": "on_demand", "engines": [spec], **fields}
    )
    return OnDemandModel(settings, engines)


class Scenario:
    """A loader with its metrics, and shortcuts for requests."""

    def __init__(self, *models: OnDemandModel, terms: LoadTerms = AT_ONCE, **fields: Any) -> None:
        self.metrics = Metrics()
        self.loader = OnDemandLoader(models, self.metrics, terms=terms, **fields)

    def ask(self, name: str) -> asyncio.Task[ModelLease]:
        return asyncio.create_task(self.loader.lease(name))

    def of(self, name: str) -> ModelSnapshot:
        return next(r for r in self.loader.snapshots() if r.name == name)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def until_waiting(self, count: int) -> None:
        await wait_until(lambda: self.loader.waiting == count)

    async def until_is(self, name: str, residency: Residency) -> None:
        await wait_until(lambda: self.of(name).residency is residency)


StartLoader = Callable[..., Scenario]


@pytest.fixture
async def start() -> AsyncIterator[StartLoader]:
    made: list[Scenario] = []

    def build(*models: OnDemandModel, **fields: Any) -> Scenario:
        scene = Scenario(*models, **fields)
        scene.loader.start()
        made.append(scene)
        return scene

    yield build
    for scene in made:
        await scene.loader.close()


def closed(name: str, **fields: Any) -> FakeEngine:
    """Return an engine that loads until its gate is opened."""
    engine = FakeEngine(name, **fields)
    engine.gate.clear()
    return engine


class TestLoading:
    async def test_nothing_is_started_before_a_request(self, start: StartLoader) -> None:
        engine = FakeEngine("a")
        scene = start(on_demand(engine))
        assert (engine.state, engine.starts) == (EngineState.STOPPED, 0)
        assert "a" in scene.loader
        assert "b" not in scene.loader

    async def test_all_requests_wait_for_one_load(self, start: StartLoader) -> None:
        engine = closed("a")
        scene = start(on_demand(engine))
        tasks = [scene.ask("a") for _ in range(20)]
        await scene.until_waiting(20)
        assert scene.metric("gateway_queue_depth", model="a") == 20
        engine.gate.set()
        with ExitStack() as stack:
            for lease in await asyncio.gather(*tasks):
                assert stack.enter_context(lease).waited_s is not None
            assert scene.of("a").leases == 20
        assert engine.starts == 1
        assert scene.of("a").leases == 0
        assert scene.metric("gateway_queue_depth", model="a") == 0
        assert scene.metric("gateway_engine_load_seconds_count", model="a") == 1

    async def test_loaded_model_is_leased_without_waiting(self, start: StartLoader) -> None:
        scene = start(on_demand(FakeEngine("a")))
        await scene.loader.load("a")
        with await scene.loader.lease("a") as lease:
            assert lease.waited_s is None
            assert scene.of("a").leases == 1

    async def test_every_engine_of_a_model_is_started(self, start: StartLoader) -> None:
        one, two = FakeEngine("a-0"), FakeEngine("a-1")
        scene = start(on_demand(one, two, name="a"))
        with await scene.loader.lease("a"):
            assert (one.starts, two.starts) == (1, 1)
            assert scene.of("a").need_gib == 2.0

    async def test_one_failed_engine_does_not_stop_the_others(self, start: StartLoader) -> None:
        scene = start(on_demand(FakeEngine("a-0", fault="no room"), FakeEngine("a-1"), name="a"))
        with await scene.loader.lease("a"):
            pass

    async def test_running_engines_count_as_loaded(self, start: StartLoader) -> None:
        engine = FakeEngine("a", state=EngineState.READY)
        scene = start(on_demand(engine))
        with await scene.loader.lease("a") as lease:
            assert lease.waited_s is None
        assert engine.starts == 0

    async def test_model_whose_engine_died_is_loaded_again(self, start: StartLoader) -> None:
        engine = FakeEngine("a")
        scene = start(on_demand(engine))
        with await scene.loader.lease("a"):
            engine.die()
            with await scene.loader.lease("a"):
                assert scene.of("a").leases == 2
        assert engine.starts == 2


class TestRefusals:
    async def test_timeout_is_answered_with_retry_after(self, start: StartLoader) -> None:
        engine = closed("a")
        scene = start(on_demand(engine, load_wait_s=0.01))
        with pytest.raises(EngineOverloaded, match=r"not loaded within 0\.01 s") as refusal:
            await scene.loader.lease("a")
        assert refusal.value.retry_after_s == 5
        assert scene.loader.waiting == 0
        engine.gate.set()
        await scene.until_is("a", Residency.LOADED)
        with await scene.loader.lease("a") as lease:
            assert lease.waited_s is None

    async def test_hopeless_wait_is_refused_at_once_and_the_load_begins(
        self, start: StartLoader
    ) -> None:
        engine = closed("a", load_s=90.0, state=EngineState.READY)
        scene = start(on_demand(engine, load_wait_s=60))
        await scene.loader.unload("a")
        with pytest.raises(EngineOverloaded, match="takes longer to load") as refusal:
            await scene.loader.lease("a")
        assert refusal.value.retry_after_s == 90
        await wait_until(lambda: engine.starts == 1)
        with pytest.raises(EngineOverloaded) as refusal:
            await scene.loader.lease("a")
        assert refusal.value.retry_after_s in (89, 90)

    async def test_full_queue_refuses(self, start: StartLoader) -> None:
        engine = closed("a")
        scene = start(on_demand(engine, queue={"max_waiting": 1}))
        waits = scene.ask("a")
        await scene.until_waiting(1)
        with pytest.raises(EngineOverloaded, match="as many requests waiting for it as it may"):
            await scene.loader.lease("a")
        engine.gate.set()
        with await waits:
            pass

    async def test_key_that_fills_the_queue_gives_places_to_others(
        self, start: StartLoader
    ) -> None:
        engine = closed("a")
        scene = start(on_demand(engine, queue={"max_waiting": 4}))
        flood = [asyncio.create_task(scene.loader.lease("a", "flood")) for _ in range(4)]
        await scene.until_waiting(4)
        others = [asyncio.create_task(scene.loader.lease("a", "other")) for _ in range(3)]
        await wait_until(lambda: sum(task.done() for task in (*flood, *others)) == 3)
        done = [task.done() for task in (*flood, *others)]
        assert done == [False, False, True, True, False, False, True]
        for task in (*flood, *others):
            if task.done():
                with pytest.raises(EngineOverloaded, match="as many requests waiting for it"):
                    await task
        engine.gate.set()
        for task in (*flood[:2], *others[:2]):
            with await task:
                pass

    async def test_failed_load_is_answered_to_all_and_backs_off(
        self, start: StartLoader, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = closed("a", fault="model directory /secret does not exist")
        scene = start(on_demand(engine, restart={"backoff_s": 30}))
        tasks = [scene.ask("a") for _ in range(3)]
        await scene.until_waiting(3)
        engine.gate.set()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(error) for error in errors} == {EngineUnavailable}
        assert not any("/secret" in str(error) for error in errors)
        assert "a: model directory /secret does not exist" in caplog.text
        with pytest.raises(EngineUnavailable, match="try again later") as refusal:
            await scene.loader.lease("a")
        assert refusal.value.retry_after_s == 30
        await scene.until_is("a", Residency.UNLOADED)
        assert (engine.starts, engine.state) == (1, EngineState.FAILED)

    async def test_permanent_fault_is_retried_only_by_an_operator(
        self, start: StartLoader, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = FakeEngine("a", fault="unrecognized arguments: --x", lasting="unknown flag")
        scene = start(on_demand(engine, restart={"backoff_s": 1e-6, "max_backoff_s": 1e-6}))
        for _ in range(3):
            with pytest.raises(EngineUnavailable) as refusal:
                await scene.loader.lease("a")
            assert refusal.value.message == (
                "the model 'a' cannot be started (unknown flag); an operator must act, retrying "
                "does not help"
            )
            assert refusal.value.retry_after_s == OPERATOR_S
        await scene.until_is("a", Residency.UNLOADED)
        assert (engine.starts, engine.rests, engine.state) == (1, 1, EngineState.FAILED)
        assert "only `vllm-gateway models load a` or a reload" in caplog.text
        assert scene.loader.forecast("a") is None
        with pytest.raises(EngineUnavailable, match="unrecognized arguments: --x"):
            await scene.loader.load("a")
        assert engine.starts == 2
        engine.fault = None
        await scene.until_is("a", Residency.UNLOADED)
        await scene.loader.load("a")
        with await scene.loader.lease("a"):
            assert engine.starts == 3

    async def test_request_after_the_backoff_loads_again(self, start: StartLoader) -> None:
        engine = FakeEngine("a", fault="no room")
        scene = start(on_demand(engine, restart={"backoff_s": 1e-6}))
        with pytest.raises(EngineUnavailable):
            await scene.loader.lease("a")
        await scene.until_is("a", Residency.UNLOADED)
        engine.fault = None
        tried_at = asyncio.get_running_loop().time()
        await wait_until(lambda: asyncio.get_running_loop().time() > tried_at)
        with await scene.loader.lease("a"):
            assert engine.starts == 2

    async def test_model_that_dies_at_every_request_backs_off(
        self, start: StartLoader, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = FakeEngine("a")
        scene = start(on_demand(engine, restart={"backoff_s": 15}))
        for _ in range(2):  # the second finds it dead, and has it loaded at once
            with await scene.loader.lease("a"):
                engine.die()
        for _ in range(3):
            with pytest.raises(EngineUnavailable, match="try again later") as refusal:
                await scene.loader.lease("a")
            assert refusal.value.retry_after_s == 30
        await scene.until_is("a", Residency.UNLOADED)
        # Otherwise its supervisor would have restarted it.
        assert (engine.starts, engine.state) == (2, EngineState.FAILED)
        assert (
            "a: it died while serving (killed by SIGKILL); next load in 30 s at the earliest"
            in caplog.text
        )
        assert scene.metric("gateway_model_evictions_total", model="a", reason="room") == 0

    @pytest.mark.parametrize("mends", ["an operator's load", "a stay that ended alive"])
    async def test_faults_are_forgotten(self, start: StartLoader, mends: str) -> None:
        engine = FakeEngine("a")
        scene = start(on_demand(engine, restart={"backoff_s": 15}))
        for _ in range(2):
            with await scene.loader.lease("a"):
                if engine.starts == 1 or mends == "an operator's load":
                    engine.die()
        if mends == "an operator's load":
            with pytest.raises(EngineUnavailable):
                await scene.loader.lease("a")
            await scene.loader.load("a")
        else:
            await scene.loader.unload("a")
        with await scene.loader.lease("a"):
            engine.die()
        with await scene.loader.lease("a"):
            assert engine.starts == 4

    async def test_model_that_cannot_fit_is_refused_at_once(
        self, start: StartLoader, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = FakeEngine("a", gib=3.0)
        scene = start(on_demand(engine), budget_gib=4.0, fixed_gib=lambda: 1.5)
        with pytest.raises(EngineUnavailable, match="does not fit"):
            await scene.loader.lease("a")
        assert engine.starts == 0
        assert "it takes 3.0 GiB, and of 4 GiB" in caplog.text

    async def test_drain_refuses_waiting_and_new_requests_but_keeps_leases(
        self, start: StartLoader
    ) -> None:
        engine = closed("b")
        scene = start(on_demand(FakeEngine("a")), on_demand(engine))
        with await scene.loader.lease("a"):
            waits = scene.ask("b")
            await scene.until_waiting(1)
            scene.loader.drain()
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await waits
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await scene.loader.lease("b")


class TestCancellation:
    async def test_cancellation_while_waiting_frees_the_place_and_the_load_goes_on(
        self, start: StartLoader
    ) -> None:
        engine = closed("a")
        scene = start(on_demand(engine, queue={"max_waiting": 1}))
        task = scene.ask("a")
        await scene.until_waiting(1)
        await wait_until(lambda: engine.starts == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert scene.loader.waiting == 0
        engine.gate.set()
        await scene.until_is("a", Residency.LOADED)
        assert (scene.of("a").leases, scene.of("a").wanted_since) == (0, None)

    async def test_cancellation_before_the_load_begins_withdraws_the_demand(
        self, start: StartLoader
    ) -> None:
        other = FakeEngine("b")
        scene = start(on_demand(FakeEngine("a")), on_demand(other), budget_gib=1.0)
        with await scene.loader.lease("a"):
            task = scene.ask("b")
            await scene.until_waiting(1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        with await scene.loader.lease("a") as lease:
            assert lease.waited_s is None
        assert other.starts == 0

    async def test_cancellation_after_the_grant_returns_the_lease(self, start: StartLoader) -> None:
        engine = closed("a")
        scene = start(on_demand(engine))
        task = scene.ask("a")
        await scene.until_waiting(1)
        engine.gate.set()
        while not scene.of("a").leases:
            await asyncio.sleep(0)
        task.cancel()  # it has its lease, and its task has not run since
        await asyncio.gather(task, return_exceptions=True)
        assert scene.of("a").leases == 0

    @pytest.mark.parametrize("event", ["answered", "removed"])
    async def test_request_canceled_before_its_model_is_answered_or_removed_ends_as_canceled(
        self, start: StartLoader, event: str
    ) -> None:
        scene = start(on_demand(closed("a")))
        task = scene.ask("a")
        await scene.until_waiting(1)
        task.cancel()  # it runs in the next turn of the loop, after what follows
        if event == "answered":
            scene.loader.drain()
        else:
            scene.loader.replace([])
        with pytest.raises(asyncio.CancelledError):
            await task
        assert scene.loader.waiting == 0

    async def test_request_canceled_before_its_model_is_removed_leaves_the_next_of_that_name_alone(
        self, start: StartLoader
    ) -> None:
        engine = closed("a")
        scene = start(on_demand(closed("a")))
        task = scene.ask("a")
        await scene.until_waiting(1)
        task.cancel()
        scene.loader.replace([])
        scene.loader.replace([on_demand(engine)])
        other = scene.ask("a")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (scene.loader.waiting, scene.of("a").wanted_since is None) == (1, False)
        engine.gate.set()
        with await other:
            pass


class TestMemory:
    async def test_idle_model_is_evicted(self, start: StartLoader) -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        scene = start(on_demand(a), on_demand(b), budget_gib=1.5)
        for name in "abab":
            with await scene.loader.lease(name):
                pass
        assert (a.starts, b.starts, a.unloads, b.unloads) == (2, 2, 2, 1)
        assert scene.metric("gateway_model_evictions_total", model="a", reason="room") == 2

    async def test_model_in_use_is_unloaded_only_after_its_requests(
        self, start: StartLoader
    ) -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        scene = start(on_demand(a), on_demand(b), budget_gib=1.5)
        with await scene.loader.lease("a"):
            waits = scene.ask("b")
            await scene.until_waiting(1)
            waits_again = scene.ask("a")
            await scene.until_waiting(2)
            assert (a.state, b.starts) == (EngineState.READY, 0)
        with await waits:
            assert a.state is EngineState.STOPPED
            assert not waits_again.done()
        with await waits_again:
            assert a.starts == 2

    async def test_models_that_fit_stay_loaded_together(self, start: StartLoader) -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        scene = start(on_demand(a), on_demand(b), budget_gib=2.0)
        with await scene.loader.lease("a"), await scene.loader.lease("b"):
            assert (a.state, b.state) == (EngineState.READY, EngineState.READY)

    async def test_refused_request_does_not_keep_a_model_from_idling(
        self, start: StartLoader
    ) -> None:
        scene = start(
            on_demand(FakeEngine("a"), queue={"max_waiting": 0}, idle_unload_s=0.01),
            on_demand(FakeEngine("b")),
            budget_gib=1.0,
        )
        await scene.loader.load("a")
        with await scene.loader.lease("a"):
            waits = scene.ask("b")
            await scene.until_waiting(1)
            with pytest.raises(EngineOverloaded):
                await scene.loader.lease("a")
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
        await scene.until_is("a", Residency.UNLOADED)

    async def test_model_of_unknown_size_is_first_loaded_alone(self, start: StartLoader) -> None:
        a, b = FakeEngine("a"), FakeEngine("b", declared=False)
        scene = start(on_demand(a), on_demand(b), budget_gib=2.0)
        with await scene.loader.lease("a"):
            pass
        with await scene.loader.lease("b"):
            assert a.state is EngineState.STOPPED
            with await scene.loader.lease("a"):
                assert b.state is EngineState.READY

    async def test_idle_model_is_unloaded_after_its_timeout(self, start: StartLoader) -> None:
        engine = FakeEngine("a")
        scene = start(on_demand(engine, idle_unload_s=0.01))
        with await scene.loader.lease("a"):
            pass
        await scene.until_is("a", Residency.UNLOADED)
        assert engine.state is EngineState.STOPPED
        assert scene.metric("gateway_model_evictions_total", model="a", reason="idle") == 1
        with await scene.loader.lease("a"):
            assert engine.starts == 2


class TestOperators:
    async def test_load_and_unload(self, start: StartLoader) -> None:
        engine = FakeEngine("a")
        scene = start(on_demand(engine))
        await scene.loader.load("a")
        await scene.loader.load("a")
        assert (engine.state, engine.starts) == (EngineState.READY, 1)
        await scene.loader.unload("a")
        await scene.loader.unload("a")
        assert (engine.state, engine.unloads) == (EngineState.STOPPED, 1)
        assert scene.metric("gateway_model_evictions_total", model="a", reason="operator") == 1

    async def test_unload_waits_for_leases_and_new_requests_wait(self, start: StartLoader) -> None:
        engine = FakeEngine("a")
        scene = start(on_demand(engine))
        with await scene.loader.lease("a"):
            unload = asyncio.create_task(scene.loader.unload("a"))
            await asyncio.sleep(0)
            comes = scene.ask("a")
            await scene.until_waiting(1)
            assert not unload.done()
        await unload
        with await comes:
            assert engine.starts == 2

    async def test_unload_returns_when_the_gateway_shuts_down(self, start: StartLoader) -> None:
        scene = start(on_demand(FakeEngine("a")))
        with await scene.loader.lease("a"):
            unload = asyncio.create_task(scene.loader.unload("a"))
            await asyncio.sleep(0)
            await scene.loader.close()
            await unload

    async def test_unload_returns_when_a_reload_removes_the_model(self, start: StartLoader) -> None:
        scene = start(on_demand(FakeEngine("a")))
        with await scene.loader.lease("a"):
            unload = asyncio.create_task(scene.loader.unload("a"))
            await asyncio.sleep(0)
            scene.loader.replace([])
            async with asyncio.timeout(PATIENCE_S):
                await unload

    async def test_unload_is_refused_while_the_gateway_drains(self, start: StartLoader) -> None:
        scene = start(on_demand(FakeEngine("a")))
        await scene.loader.load("a")
        scene.loader.drain()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await scene.loader.unload("a")

    async def test_load_by_an_operator_raises_the_reason_and_ignores_the_backoff(
        self, start: StartLoader
    ) -> None:
        engine = FakeEngine("a", fault="port in use")
        scene = start(on_demand(engine, restart={"backoff_s": 60}))
        for count in (1, 2):
            with pytest.raises(EngineUnavailable, match="a: port in use"):
                await scene.loader.load("a")
            assert engine.starts == count

    async def test_model_that_is_not_on_demand_raises_key_error(self, start: StartLoader) -> None:
        loader = start(on_demand(FakeEngine("a"))).loader
        for act in (loader.load, loader.unload):
            with pytest.raises(KeyError):
                await act("b")


class TestReplace:
    async def test_model_with_the_same_engines_keeps_its_state(self, start: StartLoader) -> None:
        engine = FakeEngine("a")
        scene = start(on_demand(engine))
        with await scene.loader.lease("a"):
            scene.loader.replace([on_demand(engine, idle_unload_s=60), on_demand(FakeEngine("b"))])
            assert (scene.of("a").leases, scene.of("a").idle_unload_s) == (1, 60)
            assert scene.of("b").residency is Residency.UNLOADED
        assert engine.starts == 1

    async def test_request_that_waits_for_old_engines_gets_the_new_ones(
        self, start: StartLoader
    ) -> None:
        old, new = closed("a"), FakeEngine("a")
        scene = start(on_demand(old), slots=2)
        task = scene.ask("a")
        await scene.until_waiting(1)
        scene.loader.replace([on_demand(new)])
        with await task:
            assert scene.of("a").leases == 1
            assert new.state is EngineState.READY
        assert scene.of("a").leases == 0

    async def test_removal_refuses_waiting_requests(self, start: StartLoader) -> None:
        scene = start(on_demand(closed("a")))
        task = scene.ask("a")
        await scene.until_waiting(1)
        scene.loader.replace([])
        with pytest.raises(EngineUnavailable, match="was removed"):
            await task
        with pytest.raises(EngineUnavailable, match="was replaced"):
            await scene.loader.lease("a")

    async def test_lease_on_old_engines_does_not_count_for_new_ones(
        self, start: StartLoader
    ) -> None:
        old, new = FakeEngine("a"), FakeEngine("a")
        scene = start(on_demand(old))
        with await scene.loader.lease("a"):
            scene.loader.replace([on_demand(new)])
            assert scene.of("a").leases == 0
        assert scene.of("a").leases == 0


class TestForecast:
    async def test_forecast_through_the_states_of_a_model(self, start: StartLoader) -> None:
        engine = FakeEngine("a")
        scene = start(on_demand(engine))
        assert scene.loader.forecast("a") == Forecast(None, cold=True)
        assert scene.loader.forecast("b") is None
        await scene.loader.load("a")
        assert scene.loader.forecast("a") == UP
        await scene.loader.unload("a")
        load_s = scene.of("a").load_s
        assert load_s is not None
        assert scene.loader.forecast("a") == Forecast(load_s, cold=True)
        assert scene.loader.loading_s("a") is None
        engine.gate.clear()
        waits = scene.ask("a")
        await scene.until_is("a", Residency.LOADING)
        forecast = scene.loader.forecast("a")
        assert forecast is not None
        assert not forecast.cold
        assert not forecast.up
        assert scene.loader.loading_s("a") is not None
        engine.gate.set()
        with await waits:
            pass

    async def test_no_forecast_during_the_backoff(self, start: StartLoader) -> None:
        scene = start(on_demand(FakeEngine("a", fault="no room"), restart={"backoff_s": 30}))
        with pytest.raises(EngineUnavailable):
            await scene.loader.lease("a")
        assert scene.loader.forecast("a") is None

    async def test_no_forecast_for_a_model_that_does_not_fit(self, start: StartLoader) -> None:
        scene = start(on_demand(FakeEngine("a", gib=2.0)), budget_gib=1.0)
        assert scene.loader.forecast("a") is None


class TestYielding:
    """A request that another model may serve sooner."""

    async def test_ends_at_once_and_the_load_goes_on(self, start: StartLoader) -> None:
        engine = closed("a")
        scene = start(on_demand(engine))
        with pytest.raises(EngineUnavailable, match="the model 'a' is loading"):
            await scene.loader.lease("a", yields=lambda: True)
        assert scene.loader.waiting == 0
        assert scene.of("a").residency is Residency.LOADING
        engine.gate.set()
        await scene.until_is("a", Residency.LOADED)

    async def test_leaves_during_its_wait_and_the_others_stay(self, start: StartLoader) -> None:
        engine = closed("a")
        scene = start(on_demand(engine))
        other = scene.ask("a")
        sooner = False
        leaves = asyncio.create_task(scene.loader.lease("a", yields=lambda: sooner))
        await scene.until_waiting(2)
        sooner = True
        scene.loader.changes.notify()
        with pytest.raises(EngineUnavailable, match="is loading"):
            await leaves
        await scene.until_waiting(1)
        assert scene.metric("gateway_queue_depth", model="a") == 1
        engine.gate.set()
        with await other:
            assert scene.of("a").leases == 1

    async def test_loaded_model_is_used(self, start: StartLoader) -> None:
        scene = start(on_demand(FakeEngine("a")))
        await scene.loader.load("a")
        with await scene.loader.lease("a", yields=lambda: True) as lease:
            assert lease.waited_s is None

    async def test_canceled_wait_is_not_reconsidered(self, start: StartLoader) -> None:
        looks: list[None] = []
        scene = start(on_demand(closed("a")))

        def look() -> bool:
            looks.append(None)
            return False

        task = asyncio.create_task(scene.loader.lease("a", yields=look))
        await scene.until_waiting(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert scene.loader.waiting == 0
        count = len(looks)
        scene.loader.changes.notify()
        await asyncio.sleep(0)
        assert len(looks) == count
        assert not scene.loader.changes._waiters
