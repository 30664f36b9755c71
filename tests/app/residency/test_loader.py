"""Requests that wait for a model to load, with engines that load when the test says so."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any

import pytest

from app.errors import OPERATOR_S, EngineOverloaded, EngineUnavailable
from app.residency.entry import OnDemand
from app.residency.forecast import UP, Forecast
from app.residency.loader import OnDemandLoader
from app.residency.model_lease import ModelLease
from app.residency.policy import LoadTerms, Residency, Resident
from app.settings import ModelSettings
from app.telemetry.metrics import Metrics
from engines.base import EngineState
from tests.app.residency.engines import FakeEngine

# Nothing here waits for these: what has to be idle or patient is so at once.
AT_ONCE = LoadTerms(patience_s=0, keep_s=0, keep_loads=0, settle_s=0, settle_loads=0)
PATIENCE_S = 10.0


def on_demand(*engines: FakeEngine, name: str | None = None, **fields: Any) -> OnDemand:
    """Return a model behind these engines, called as the first of them."""
    spec = {"kind": "process", "model": "m", "restart": fields.pop("restart", {})}
    settings = ModelSettings.model_validate(
        {"name": name or engines[0].name, "load": "on_demand", "engines": [spec], **fields}
    )
    return OnDemand(settings, engines)


class Kept:
    """A keeper, its metrics, and what is asked of it."""

    def __init__(self, *models: OnDemand, terms: LoadTerms = AT_ONCE, **fields: Any) -> None:
        self.metrics = Metrics()
        self.keeper = OnDemandLoader(models, self.metrics, terms=terms, **fields)

    def ask(self, name: str) -> asyncio.Task[ModelLease]:
        return asyncio.create_task(self.keeper.hold(name))

    def of(self, name: str) -> Resident:
        return next(r for r in self.keeper.residents() if r.name == name)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def until_waiting(self, count: int) -> None:
        await self.until(lambda: self.keeper.waiting == count)

    async def until_is(self, name: str, residency: Residency) -> None:
        await self.until(lambda: self.of(name).residency is residency)


Keep = Callable[..., Kept]


@pytest.fixture
async def keep() -> AsyncIterator[Keep]:
    made: list[Kept] = []

    def build(*models: OnDemand, **fields: Any) -> Kept:
        kept = Kept(*models, **fields)
        kept.keeper.start()
        made.append(kept)
        return kept

    yield build
    for kept in made:
        await kept.keeper.close()


def closed(name: str, **fields: Any) -> FakeEngine:
    """Return an engine that goes on loading until its gate is opened."""
    engine = FakeEngine(name, **fields)
    engine.gate.clear()
    return engine


class TestLoading:
    async def test_nothing_is_started_before_somebody_asks(self, keep: Keep) -> None:
        engine = FakeEngine("a")
        kept = keep(on_demand(engine))
        assert (engine.state, engine.starts) == (EngineState.STOPPED, 0)
        assert "a" in kept.keeper
        assert "b" not in kept.keeper

    async def test_requests_wait_for_one_load_however_many_they_are(self, keep: Keep) -> None:
        engine = closed("a")
        kept = keep(on_demand(engine))
        tasks = [kept.ask("a") for _ in range(20)]
        await kept.until_waiting(20)
        assert kept.metric("gateway_queue_depth", model="a") == 20
        engine.gate.set()
        with ExitStack() as stack:
            for hold in await asyncio.gather(*tasks):
                assert stack.enter_context(hold).waited_s is not None
            assert kept.of("a").holds == 20
        assert engine.starts == 1
        assert kept.of("a").holds == 0
        assert kept.metric("gateway_queue_depth", model="a") == 0
        assert kept.metric("gateway_engine_load_seconds_count", model="a") == 1

    async def test_a_loaded_model_is_held_without_waiting(self, keep: Keep) -> None:
        kept = keep(on_demand(FakeEngine("a")))
        await kept.keeper.load("a")
        with await kept.keeper.hold("a") as hold:
            assert hold.waited_s is None
            assert kept.of("a").holds == 1

    async def test_every_engine_of_a_model_is_started(self, keep: Keep) -> None:
        one, two = FakeEngine("a-0"), FakeEngine("a-1")
        kept = keep(on_demand(one, two, name="a"))
        with await kept.keeper.hold("a"):
            assert (one.starts, two.starts) == (1, 1)
            assert kept.of("a").need_gib == 2.0

    async def test_an_engine_that_does_not_start_leaves_the_others(self, keep: Keep) -> None:
        kept = keep(on_demand(FakeEngine("a-0", fault="no room"), FakeEngine("a-1"), name="a"))
        with await kept.keeper.hold("a"):
            pass

    async def test_engines_that_run_already_are_taken_as_loaded(self, keep: Keep) -> None:
        engine = FakeEngine("a", state=EngineState.READY)
        kept = keep(on_demand(engine))
        with await kept.keeper.hold("a") as hold:
            assert hold.waited_s is None
        assert engine.starts == 0

    async def test_a_model_whose_engine_died_is_loaded_again(self, keep: Keep) -> None:
        engine = FakeEngine("a")
        kept = keep(on_demand(engine))
        with await kept.keeper.hold("a"):
            engine.die()
            with await kept.keeper.hold("a"):
                assert kept.of("a").holds == 2
        assert engine.starts == 2


class TestRefusals:
    async def test_a_load_that_takes_too_long_is_told_with_a_time_to_come_back(
        self, keep: Keep
    ) -> None:
        engine = closed("a")
        kept = keep(on_demand(engine, load_wait_s=0.01))
        with pytest.raises(EngineOverloaded, match=r"not loaded within 0\.01 s") as refusal:
            await kept.keeper.hold("a")
        assert refusal.value.retry_after_s == 5
        assert kept.keeper.waiting == 0
        engine.gate.set()
        await kept.until_is("a", Residency.LOADED)
        with await kept.keeper.hold("a") as hold:
            assert hold.waited_s is None

    async def test_who_would_wait_too_long_is_refused_at_once_and_the_load_begins(
        self, keep: Keep
    ) -> None:
        engine = closed("a", load_s=90.0, state=EngineState.READY)
        kept = keep(on_demand(engine, load_wait_s=60))
        await kept.keeper.unload("a")
        with pytest.raises(EngineOverloaded, match="takes longer to load") as refusal:
            await kept.keeper.hold("a")
        assert refusal.value.retry_after_s == 90
        await kept.until(lambda: engine.starts == 1)
        with pytest.raises(EngineOverloaded) as refusal:
            await kept.keeper.hold("a")
        assert refusal.value.retry_after_s in (89, 90)

    async def test_more_than_may_wait_are_refused(self, keep: Keep) -> None:
        engine = closed("a")
        kept = keep(on_demand(engine, queue={"max_waiting": 1}))
        waits = kept.ask("a")
        await kept.until_waiting(1)
        with pytest.raises(EngineOverloaded, match="as many requests waiting for it as it may"):
            await kept.keeper.hold("a")
        engine.gate.set()
        with await waits:
            pass

    async def test_a_load_that_fails_is_told_to_all_and_not_tried_again_before_its_time(
        self, keep: Keep, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = closed("a", fault="model directory /secret does not exist")
        kept = keep(on_demand(engine, restart={"backoff_s": 30}))
        tasks = [kept.ask("a") for _ in range(3)]
        await kept.until_waiting(3)
        engine.gate.set()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(error) for error in errors} == {EngineUnavailable}
        assert not any("/secret" in str(error) for error in errors)
        assert "a: model directory /secret does not exist" in caplog.text
        with pytest.raises(EngineUnavailable, match="try again later") as refusal:
            await kept.keeper.hold("a")
        assert refusal.value.retry_after_s == 30
        await kept.until_is("a", Residency.UNLOADED)
        assert (engine.starts, engine.state) == (1, EngineState.FAILED)

    async def test_a_load_that_cannot_work_is_tried_again_for_an_operator_alone(
        self, keep: Keep, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = FakeEngine("a", fault="unrecognized arguments: --x", lasting="unknown flag")
        kept = keep(on_demand(engine, restart={"backoff_s": 1e-6, "max_backoff_s": 1e-6}))
        for _ in range(3):
            with pytest.raises(EngineUnavailable) as refusal:
                await kept.keeper.hold("a")
            assert refusal.value.message == (
                "the model 'a' cannot be started (unknown flag); an operator must act, retrying "
                "does not help"
            )
            assert refusal.value.retry_after_s == OPERATOR_S
        await kept.until_is("a", Residency.UNLOADED)
        assert (engine.starts, engine.rests, engine.state) == (1, 1, EngineState.FAILED)
        assert "`vllm-gateway models load a` does" in caplog.text
        assert kept.keeper.forecast("a") is None
        with pytest.raises(EngineUnavailable, match="unrecognized arguments: --x"):
            await kept.keeper.load("a")
        assert engine.starts == 2
        engine.fault = None
        await kept.until_is("a", Residency.UNLOADED)
        await kept.keeper.load("a")
        with await kept.keeper.hold("a"):
            assert engine.starts == 3

    async def test_the_next_request_after_the_backoff_tries_again(self, keep: Keep) -> None:
        engine = FakeEngine("a", fault="no room")
        kept = keep(on_demand(engine, restart={"backoff_s": 1e-6}))
        with pytest.raises(EngineUnavailable):
            await kept.keeper.hold("a")
        await kept.until_is("a", Residency.UNLOADED)
        engine.fault = None
        tried_at = asyncio.get_running_loop().time()
        await kept.until(lambda: asyncio.get_running_loop().time() > tried_at)
        with await kept.keeper.hold("a"):
            assert engine.starts == 2

    async def test_a_model_that_dies_at_each_request_is_not_loaded_for_each(
        self, keep: Keep, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = FakeEngine("a")
        kept = keep(on_demand(engine, restart={"backoff_s": 15}))
        for _ in range(2):  # the second finds it dead, and has it loaded at once
            with await kept.keeper.hold("a"):
                engine.die()
        for _ in range(3):
            with pytest.raises(EngineUnavailable, match="try again later") as refusal:
                await kept.keeper.hold("a")
            assert refusal.value.retry_after_s == 30
        await kept.until_is("a", Residency.UNLOADED)
        # Its supervisor would have started it again by itself.
        assert (engine.starts, engine.state) == (2, EngineState.FAILED)
        assert "a: it died while serving (killed by SIGKILL)); not loaded for 30 s" in caplog.text
        assert kept.metric("gateway_model_evictions_total", model="a", reason="room") == 0

    @pytest.mark.parametrize("mends", ["an operator's load", "a stay that ended alive"])
    async def test_faults_are_forgotten(self, keep: Keep, mends: str) -> None:
        engine = FakeEngine("a")
        kept = keep(on_demand(engine, restart={"backoff_s": 15}))
        for _ in range(2):
            with await kept.keeper.hold("a"):
                if engine.starts == 1 or mends == "an operator's load":
                    engine.die()
        if mends == "an operator's load":
            with pytest.raises(EngineUnavailable):
                await kept.keeper.hold("a")
            await kept.keeper.load("a")
        else:
            await kept.keeper.unload("a")
        with await kept.keeper.hold("a"):
            engine.die()
        with await kept.keeper.hold("a"):
            assert engine.starts == 4

    async def test_a_model_that_cannot_fit_is_refused_at_once(
        self, keep: Keep, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = FakeEngine("a", gib=3.0)
        kept = keep(on_demand(engine), budget_gib=4.0, fixed_gib=lambda: 1.5)
        with pytest.raises(EngineUnavailable, match="does not fit"):
            await kept.keeper.hold("a")
        assert engine.starts == 0
        assert "it takes 3.0 GiB, and of 4 GiB" in caplog.text

    async def test_drain_refuses_who_waits_and_who_comes_but_not_who_is_served(
        self, keep: Keep
    ) -> None:
        engine = closed("b")
        kept = keep(on_demand(FakeEngine("a")), on_demand(engine))
        with await kept.keeper.hold("a"):
            waits = kept.ask("b")
            await kept.until_waiting(1)
            kept.keeper.drain()
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await waits
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await kept.keeper.hold("b")


class TestLeaving:
    async def test_who_leaves_frees_the_place_and_the_load_goes_on(self, keep: Keep) -> None:
        engine = closed("a")
        kept = keep(on_demand(engine, queue={"max_waiting": 1}))
        task = kept.ask("a")
        await kept.until_waiting(1)
        await kept.until(lambda: engine.starts == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert kept.keeper.waiting == 0
        engine.gate.set()
        await kept.until_is("a", Residency.LOADED)
        assert (kept.of("a").holds, kept.of("a").wanted_since) == (0, None)

    async def test_who_leaves_before_the_load_begins_wants_nothing_any_more(
        self, keep: Keep
    ) -> None:
        other = FakeEngine("b")
        kept = keep(on_demand(FakeEngine("a")), on_demand(other), budget_gib=1.0)
        with await kept.keeper.hold("a"):
            task = kept.ask("b")
            await kept.until_waiting(1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        with await kept.keeper.hold("a") as hold:
            assert hold.waited_s is None
        assert other.starts == 0

    async def test_who_leaves_at_the_moment_of_the_hold_gives_it_back(self, keep: Keep) -> None:
        engine = closed("a")
        kept = keep(on_demand(engine))
        task = kept.ask("a")
        await kept.until_waiting(1)
        engine.gate.set()
        while not kept.of("a").holds:
            await asyncio.sleep(0)
        task.cancel()  # it has its hold, and has not run since
        await asyncio.gather(task, return_exceptions=True)
        assert kept.of("a").holds == 0

    @pytest.mark.parametrize("event", ["answered", "removed"])
    async def test_request_canceled_before_its_model_is_answered_or_removed_ends_as_canceled(
        self, keep: Keep, event: str
    ) -> None:
        kept = keep(on_demand(closed("a")))
        task = kept.ask("a")
        await kept.until_waiting(1)
        task.cancel()  # it runs in the next turn of the loop, after what follows
        if event == "answered":
            kept.keeper.drain()
        else:
            kept.keeper.replace([])
        with pytest.raises(asyncio.CancelledError):
            await task
        assert kept.keeper.waiting == 0

    async def test_request_canceled_before_its_model_is_removed_leaves_the_next_of_that_name_alone(
        self, keep: Keep
    ) -> None:
        engine = closed("a")
        kept = keep(on_demand(closed("a")))
        task = kept.ask("a")
        await kept.until_waiting(1)
        task.cancel()
        kept.keeper.replace([])
        kept.keeper.replace([on_demand(engine)])
        other = kept.ask("a")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (kept.keeper.waiting, kept.of("a").wanted_since is None) == (1, False)
        engine.gate.set()
        with await other:
            pass


class TestRoom:
    async def test_an_idle_model_makes_room(self, keep: Keep) -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        kept = keep(on_demand(a), on_demand(b), budget_gib=1.5)
        for name in "abab":
            with await kept.keeper.hold(name):
                pass
        assert (a.starts, b.starts, a.unloads, b.unloads) == (2, 2, 2, 1)
        assert kept.metric("gateway_model_evictions_total", model="a", reason="room") == 2

    async def test_one_that_serves_is_not_unloaded_before_it_has_ended(self, keep: Keep) -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        kept = keep(on_demand(a), on_demand(b), budget_gib=1.5)
        with await kept.keeper.hold("a"):
            waits = kept.ask("b")
            await kept.until_waiting(1)
            held_back = kept.ask("a")
            await kept.until_waiting(2)
            assert (a.state, b.starts) == (EngineState.READY, 0)
        with await waits:
            assert a.state is EngineState.STOPPED
            assert not held_back.done()
        with await held_back:
            assert a.starts == 2

    async def test_models_that_fit_stay_side_by_side(self, keep: Keep) -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        kept = keep(on_demand(a), on_demand(b), budget_gib=2.0)
        with await kept.keeper.hold("a"), await kept.keeper.hold("b"):
            assert (a.state, b.state) == (EngineState.READY, EngineState.READY)

    async def test_who_was_told_to_come_back_leaves_no_model_that_is_never_idle(
        self, keep: Keep
    ) -> None:
        kept = keep(
            on_demand(FakeEngine("a"), queue={"max_waiting": 0}, idle_unload_s=0.01),
            on_demand(FakeEngine("b")),
            budget_gib=1.0,
        )
        await kept.keeper.load("a")
        with await kept.keeper.hold("a"):
            waits = kept.ask("b")
            await kept.until_waiting(1)
            with pytest.raises(EngineOverloaded):
                await kept.keeper.hold("a")
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
        await kept.until_is("a", Residency.UNLOADED)

    async def test_one_of_unknown_need_is_loaded_alone_once(self, keep: Keep) -> None:
        a, b = FakeEngine("a"), FakeEngine("b", declared=False)
        kept = keep(on_demand(a), on_demand(b), budget_gib=2.0)
        with await kept.keeper.hold("a"):
            pass
        with await kept.keeper.hold("b"):
            assert a.state is EngineState.STOPPED
            with await kept.keeper.hold("a"):
                assert b.state is EngineState.READY

    async def test_an_idle_model_leaves_after_its_time(self, keep: Keep) -> None:
        engine = FakeEngine("a")
        kept = keep(on_demand(engine, idle_unload_s=0.01))
        with await kept.keeper.hold("a"):
            pass
        await kept.until_is("a", Residency.UNLOADED)
        assert engine.state is EngineState.STOPPED
        assert kept.metric("gateway_model_evictions_total", model="a", reason="idle") == 1
        with await kept.keeper.hold("a"):
            assert engine.starts == 2


class TestOperators:
    async def test_load_and_unload(self, keep: Keep) -> None:
        engine = FakeEngine("a")
        kept = keep(on_demand(engine))
        await kept.keeper.load("a")
        await kept.keeper.load("a")
        assert (engine.state, engine.starts) == (EngineState.READY, 1)
        await kept.keeper.unload("a")
        await kept.keeper.unload("a")
        assert (engine.state, engine.unloads) == (EngineState.STOPPED, 1)
        assert kept.metric("gateway_model_evictions_total", model="a", reason="operator") == 1

    async def test_unload_waits_for_those_in_flight_and_holds_back_the_rest(
        self, keep: Keep
    ) -> None:
        engine = FakeEngine("a")
        kept = keep(on_demand(engine))
        with await kept.keeper.hold("a"):
            unload = asyncio.create_task(kept.keeper.unload("a"))
            await asyncio.sleep(0)
            comes = kept.ask("a")
            await kept.until_waiting(1)
            assert not unload.done()
        await unload
        with await comes:
            assert engine.starts == 2

    async def test_unload_returns_when_the_gateway_ends(self, keep: Keep) -> None:
        kept = keep(on_demand(FakeEngine("a")))
        with await kept.keeper.hold("a"):
            unload = asyncio.create_task(kept.keeper.unload("a"))
            await asyncio.sleep(0)
            await kept.keeper.close()
            await unload

    async def test_load_tells_an_operator_the_reason_and_does_not_wait_for_the_backoff(
        self, keep: Keep
    ) -> None:
        engine = FakeEngine("a", fault="port in use")
        kept = keep(on_demand(engine, restart={"backoff_s": 60}))
        for count in (1, 2):
            with pytest.raises(EngineUnavailable, match="a: port in use"):
                await kept.keeper.load("a")
            assert engine.starts == count

    async def test_a_model_that_is_not_on_demand_is_a_key_error(self, keep: Keep) -> None:
        keeper = keep(on_demand(FakeEngine("a"))).keeper
        for act in (keeper.load, keeper.unload):
            with pytest.raises(KeyError):
                await act("b")


class TestReplacing:
    async def test_a_model_with_the_same_engines_stays_as_it_is(self, keep: Keep) -> None:
        engine = FakeEngine("a")
        kept = keep(on_demand(engine))
        with await kept.keeper.hold("a"):
            kept.keeper.replace([on_demand(engine, idle_unload_s=60), on_demand(FakeEngine("b"))])
            assert (kept.of("a").holds, kept.of("a").idle_unload_s) == (1, 60)
            assert kept.of("b").residency is Residency.UNLOADED
        assert engine.starts == 1

    async def test_who_waits_for_old_engines_gets_the_new_ones(self, keep: Keep) -> None:
        old, new = closed("a"), FakeEngine("a")
        kept = keep(on_demand(old), slots=2)
        task = kept.ask("a")
        await kept.until_waiting(1)
        kept.keeper.replace([on_demand(new)])
        with await task:
            assert kept.of("a").holds == 1
            assert new.state is EngineState.READY
        assert kept.of("a").holds == 0

    async def test_who_waits_for_a_model_that_is_removed_is_told(self, keep: Keep) -> None:
        kept = keep(on_demand(closed("a")))
        task = kept.ask("a")
        await kept.until_waiting(1)
        kept.keeper.replace([])
        with pytest.raises(EngineUnavailable, match="was removed"):
            await task
        with pytest.raises(EngineUnavailable, match="was replaced"):
            await kept.keeper.hold("a")

    async def test_holds_on_old_engines_end_where_they_began(self, keep: Keep) -> None:
        old, new = FakeEngine("a"), FakeEngine("a")
        kept = keep(on_demand(old))
        with await kept.keeper.hold("a"):
            kept.keeper.replace([on_demand(new)])
            assert kept.of("a").holds == 0
        assert kept.of("a").holds == 0


class TestForecast:
    async def test_says_when_a_model_is_up_as_far_as_that_is_known(self, keep: Keep) -> None:
        engine = FakeEngine("a")
        kept = keep(on_demand(engine))
        assert kept.keeper.forecast("a") == Forecast(None, cold=True)
        assert kept.keeper.forecast("b") is None
        await kept.keeper.load("a")
        assert kept.keeper.forecast("a") == UP
        await kept.keeper.unload("a")
        load_s = kept.of("a").load_s
        assert load_s is not None
        assert kept.keeper.forecast("a") == Forecast(load_s, cold=True)
        assert kept.keeper.loading_s("a") is None
        engine.gate.clear()
        waits = kept.ask("a")
        await kept.until_is("a", Residency.LOADING)
        forecast = kept.keeper.forecast("a")
        assert forecast is not None
        assert not forecast.cold
        assert not forecast.up
        assert kept.keeper.loading_s("a") is not None
        engine.gate.set()
        with await waits:
            pass

    async def test_nothing_is_expected_of_a_model_that_rests(self, keep: Keep) -> None:
        kept = keep(on_demand(FakeEngine("a", fault="no room"), restart={"backoff_s": 30}))
        with pytest.raises(EngineUnavailable):
            await kept.keeper.hold("a")
        assert kept.keeper.forecast("a") is None

    async def test_nothing_is_expected_of_a_model_that_does_not_fit(self, keep: Keep) -> None:
        kept = keep(on_demand(FakeEngine("a", gib=2.0)), budget_gib=1.0)
        assert kept.keeper.forecast("a") is None


class TestYielding:
    """A request that another model may serve sooner."""

    async def test_leaves_at_once_and_the_load_goes_on(self, keep: Keep) -> None:
        engine = closed("a")
        kept = keep(on_demand(engine))
        with pytest.raises(EngineUnavailable, match="the model 'a' is loading"):
            await kept.keeper.hold("a", yields=lambda: True)
        assert kept.keeper.waiting == 0
        assert kept.of("a").residency is Residency.LOADING
        engine.gate.set()
        await kept.until_is("a", Residency.LOADED)

    async def test_leaves_during_its_wait_and_the_others_stay(self, keep: Keep) -> None:
        engine = closed("a")
        kept = keep(on_demand(engine))
        other = kept.ask("a")
        sooner = False
        leaves = asyncio.create_task(kept.keeper.hold("a", yields=lambda: sooner))
        await kept.until_waiting(2)
        sooner = True
        kept.keeper.changes.notify()
        with pytest.raises(EngineUnavailable, match="is loading"):
            await leaves
        await kept.until_waiting(1)
        assert kept.metric("gateway_queue_depth", model="a") == 1
        engine.gate.set()
        with await other:
            assert kept.of("a").holds == 1

    async def test_a_model_that_is_loaded_is_used(self, keep: Keep) -> None:
        kept = keep(on_demand(FakeEngine("a")))
        await kept.keeper.load("a")
        with await kept.keeper.hold("a", yields=lambda: True) as hold:
            assert hold.waited_s is None

    async def test_canceled_wait_is_not_reconsidered(self, keep: Keep) -> None:
        looks: list[None] = []
        kept = keep(on_demand(closed("a")))

        def look() -> bool:
            looks.append(None)
            return False

        task = asyncio.create_task(kept.keeper.hold("a", yields=look))
        await kept.until_waiting(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert kept.keeper.waiting == 0
        count = len(looks)
        kept.keeper.changes.notify()
        await asyncio.sleep(0)
        assert len(looks) == count
        assert not kept.keeper.changes._waiters
