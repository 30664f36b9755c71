"""Scaling a running gateway: engines come for a queue, go when it is over, and survive reloads."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.fleet.builder import Builder
from app.fleet.deployment import DeployedEngine, ModelDeployment
from app.fleet.engine_plan import EngineConfig
from app.routing import Replica
from app.scaling import Autoscaler
from app.scaling.policy import DOWN_S, UP_S
from app.settings import Settings
from engines.base import EngineNotReady, EngineState
from engines.spec import RemoteSpec, ReplicaRange
from tests.app.routing.fakes import FakeEngine
from tests.gateway import Gateway, running, settings_for
from tests.waiting import run_pending_tasks, wait_until


class ScaledEngine(FakeEngine):
    """An engine that starts when it is let to, and stops at once."""

    begun: bool = False
    broken: bool = False

    @property
    def given_up(self) -> bool:
        return self.broken

    async def ensure_ready(self, deadline: float) -> None:
        self.begun = True
        await self.changes.wait_for(lambda: self.state is EngineState.READY or self.retired)
        if self.retired:
            raise EngineNotReady("it was removed")

    async def drain(self) -> None:
        self.state = EngineState.DRAINING

    async def stop(self, grace: float) -> None:
        self.state = EngineState.STOPPED


@dataclass
class Scaled:
    """A gateway with a scaled model, and a scaler with a clock of the test's own."""

    gateway: Gateway
    directory: Path
    scaler: Autoscaler
    configured: list[Settings]
    now: float = 0.0
    held: list[ExitStack] = field(default_factory=list)
    waiting: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def engines(self) -> dict[str, ScaledEngine]:
        found = self.gateway.state.catalogue.resolve("demo").replicas
        return {r.engine.name: r.engine for r in found if isinstance(r.engine, ScaledEngine)}

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            self.scaler.decide(self.now)

    async def ask(self, count: int) -> None:
        """Begin requests that last until `finish`."""

        async def one() -> None:
            stack = ExitStack()
            permit = await self.gateway.state.admission.acquire("demo", "a key")
            stack.enter_context(permit)
            self.held.append(stack)

        self.waiting += [asyncio.create_task(one()) for _ in range(count)]
        await asyncio.sleep(0)

    async def finish(self) -> None:
        """End all requests."""
        while self.held or not all(task.done() for task in self.waiting):
            for stack in self.held:
                stack.close()
            self.held.clear()
            await asyncio.sleep(0)

    async def grow(self) -> None:
        """Have a second engine started, for the six requests that two engines cannot take."""
        await self.ask(6)
        self.pass_time(UP_S + 1)
        await self.has("demo-0", "demo-1")
        await self.let_start()

    async def has(self, *names: str) -> None:
        await wait_until(lambda: sorted(self.engines) == sorted(names))

    async def let_start(self) -> None:
        """Have engines become READY, and return when the step is over."""

        def is_over() -> bool:
            for engine in self.engines.values():
                if engine.state in (EngineState.STOPPED, EngineState.FAILED):
                    engine.state = EngineState.READY
            return not self.scaler.stepping

        await wait_until(is_over)


def demo(directory: Path, **replicas: Any) -> Settings:
    bounds = {"min": 1, "max": 3, **replicas}
    engine = {"kind": "ray", "model": "/models/demo", "replicas": bounds}
    model = {"name": "demo", "queue": {"max_in_flight": 2}, "engines": [engine]}
    return settings_for(model, run_dir=directory)


@asynccontextmanager
async def scaling(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scaled]:
    """Run a gateway with a scaled model, whose first engine is READY."""

    def build(_: Builder, model: str, config: EngineConfig) -> Replica:
        state = EngineState.READY if config.name == "demo-0" else EngineState.STOPPED
        return Replica(ScaledEngine(config.name, state), model)

    async def idle(_: Autoscaler) -> None:
        """Leave the decisions to the test."""

    monkeypatch.setattr(Builder, "__call__", build)
    monkeypatch.setattr(Autoscaler, "run", idle)
    configured = [demo(directory)]
    async with running(configured[0], source=lambda: configured[-1]) as gateway:
        state = gateway.state
        scaler = Autoscaler(state.fleet, state.admission, asyncio.Event())
        one = Scaled(gateway, directory, scaler, configured)
        yield one
        await one.finish()


@pytest.fixture
async def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scaled]:
    async with scaling(tmp_path, monkeypatch) as one:
        yield one


async def test_an_engine_is_started_for_a_queue_and_stopped_when_it_is_over(
    scaled: Scaled,
) -> None:
    await scaled.ask(6)
    scaled.pass_time(UP_S + 1)
    await scaled.has("demo-0", "demo-1")
    assert dict(scaled.scaler.wanted()) == {"demo": 2}
    await wait_until(lambda: scaled.engines["demo-1"].begun)
    assert scaled.gateway.state.admission.counts("demo") == (2, 4)

    await scaled.let_start()
    await wait_until(lambda: scaled.gateway.state.admission.counts("demo") == (4, 2))
    await scaled.finish()
    last = scaled.engines["demo-1"]
    scaled.pass_time(DOWN_S + 1)
    await scaled.has("demo-0")
    assert last.state is EngineState.STOPPED


async def test_a_start_that_is_under_way_is_waited_for(scaled: Scaled) -> None:
    await scaled.ask(20)
    scaled.pass_time(UP_S + 1)
    await scaled.has("demo-0", "demo-1")
    scaled.pass_time(10 * UP_S)
    await scaled.has("demo-0", "demo-1")
    await scaled.let_start()
    scaled.pass_time(UP_S + 1)
    await scaled.has("demo-0", "demo-1", "demo-2")


async def test_an_engine_that_was_given_up_does_not_hold_the_others_back(scaled: Scaled) -> None:
    await scaled.ask(20)
    scaled.pass_time(UP_S + 1)
    await scaled.has("demo-0", "demo-1")
    await scaled.let_start()
    broken = scaled.engines["demo-1"]
    broken.broken, broken.state = True, EngineState.FAILED
    scaled.pass_time(UP_S + 1)
    await scaled.has("demo-0", "demo-1", "demo-2")


async def test_no_engine_is_added_beyond_one_that_was_given_up_at_the_maximum(
    scaled: Scaled, caplog: pytest.LogCaptureFixture
) -> None:
    scaled.configured.append(demo(scaled.directory, max=2))
    assert (await scaled.gateway.state.reloader.reload(wait=True)).ok
    await scaled.ask(20)
    scaled.pass_time(UP_S + 1)
    await scaled.has("demo-0", "demo-1")
    await scaled.let_start()
    broken = scaled.engines["demo-1"]
    broken.broken, broken.state = True, EngineState.FAILED
    caplog.set_level(logging.INFO)
    caplog.clear()
    scaled.pass_time(100)
    await run_pending_tasks()
    await scaled.has("demo-0", "demo-1")
    assert dict(scaled.scaler.wanted()) == {"demo": 2}
    assert [line for line in caplog.messages if "become" in line] == []


async def test_an_engine_that_never_starts_goes_when_its_load_is_over(scaled: Scaled) -> None:
    """It may wait for room in the cluster for ever."""
    await scaled.ask(6)
    scaled.pass_time(UP_S + 1)
    await scaled.has("demo-0", "demo-1")
    await scaled.finish()
    scaled.pass_time(DOWN_S + 1)
    await scaled.has("demo-0")


async def test_an_engine_that_is_not_ready_goes_first(scaled: Scaled) -> None:
    await scaled.grow()
    await scaled.finish()
    scaled.engines["demo-0"].state = EngineState.FAILED  # it will be restarted
    scaled.pass_time(DOWN_S + 1)
    await scaled.has("demo-1")


async def test_discovered_servers_that_come_and_go_do_not_hold_scaling_up(scaled: Scaled) -> None:
    deployment = scaled.gateway.state.fleet.deployments["demo"]
    spec = RemoteSpec(kind="remote", url="http://10.0.0.7:8000")
    config = EngineConfig("demo-10.0.0.7-8000", spec, discovered=True)
    server = DeployedEngine(config, Replica(FakeEngine(config.name), "demo"))
    await scaled.ask(20)
    for second in range(30):
        deployment.members[:] = [server] if second % 2 else []
        scaled.pass_time(1)
    assert scaled.scaler.stepping
    deployment.members.clear()
    await scaled.has("demo-0", "demo-1")


async def test_nothing_is_started_while_the_gateway_drains(scaled: Scaled) -> None:
    await scaled.ask(20)
    scaled.gateway.state.admission.drain(refuse=False)
    scaled.pass_time(3 * UP_S)
    assert not scaled.scaler.stepping
    await scaled.has("demo-0")


async def test_a_fault_of_one_model_does_not_hold_the_others_up(
    scaled: Scaled, caplog: pytest.LogCaptureFixture
) -> None:
    deployments = scaled.gateway.state.fleet.deployments
    assert isinstance(deployments, dict)
    settings = deployments["demo"].settings.model_copy(update={"name": "broken"})
    demo = deployments.pop("demo")
    deployments |= {"broken": ModelDeployment(settings, []), "demo": demo}  # it has no queue
    await scaled.ask(20)
    scaled.pass_time(UP_S + 1)
    await scaled.has("demo-0", "demo-1")
    del deployments["broken"]
    assert "model broken could not be scaled" in caplog.text


async def test_a_reload_keeps_the_engines_that_were_added(scaled: Scaled) -> None:
    await scaled.grow()
    scaled.configured.append(demo(scaled.directory, max=4, target_wait_s=1))
    report = await scaled.gateway.state.reloader.reload(wait=True)
    assert report.ok, report
    await scaled.has("demo-0", "demo-1")
    assert all(engine.state is EngineState.READY for engine in scaled.engines.values())


async def test_a_reload_of_the_bounds_alone_applies_them(scaled: Scaled) -> None:
    scaled.configured.append(demo(scaled.directory, max=2, target_wait_s=1))
    report = await scaled.gateway.state.reloader.reload(wait=True)
    assert report.difference == (
        "~ model demo: replicas.max 3 → 2",
        "~ model demo: replicas.target_wait_s 5.0 → 1.0",
    )
    bounds = scaled.gateway.state.fleet.deployments["demo"].settings.scaling
    assert bounds == ReplicaRange(min=1, max=2, target_wait_s=1)


async def test_a_reload_to_fewer_engines_takes_those_that_are_too_many(scaled: Scaled) -> None:
    await scaled.grow()
    scaled.configured.append(demo(scaled.directory, max=1))
    assert (await scaled.gateway.state.reloader.reload(wait=True)).ok
    await scaled.has("demo-0")


async def test_wanted_engines_are_exported(scaled: Scaled) -> None:
    state = scaled.gateway.state
    state.autoscaler.decide(0.0)
    assert await scaled.gateway.metric("gateway_engines_wanted", model="demo") == 1


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 8)),
        st.tuples(st.just("finish"), st.just(0)),
        st.tuples(st.just("pass"), st.sampled_from([1, 12, 60, 320])),
        st.tuples(st.just("start"), st.integers(0, 3)),
        st.tuples(st.just("fail"), st.integers(0, 3)),
        st.tuples(st.just("give up"), st.integers(0, 3)),
        st.tuples(st.just("bounds"), st.integers(1, 4)),
        st.tuples(st.just("turns"), st.sampled_from([0, 1, 3, 50])),
    ),
    max_size=20,
)


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(taken=steps)
def test_any_order_ends_with_as_many_engines_as_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[tuple[str, int]]
) -> None:
    async def play() -> None:
        with monkeypatch.context() as patch:
            async with scaling(tmp_path, patch) as scaled:
                most = await take_steps(scaled, taken)
                # Every engine is well, and there is nothing to do any more.
                for engine in scaled.engines.values():
                    engine.broken = False
                await scaled.finish()
                for _ in range(6):
                    await scaled.let_start()
                    scaled.pass_time(DOWN_S + 10)
                    await run_pending_tasks()
                assert len(scaled.engines) == 1 <= most
                assert all(one.state is EngineState.READY for one in scaled.engines.values())
                await wait_until(lambda: not scaled.scaler.stepping)

    asyncio.run(play())


async def take_steps(scaled: Scaled, taken: list[tuple[str, int]]) -> int:
    """Take steps; return the maximum of engines in the end."""
    most = 3
    for step, number in taken:
        engines = list(scaled.engines.values())
        engine = engines[min(number, len(engines) - 1)]
        if step == "ask":
            await scaled.ask(number)
        elif step == "finish":
            await scaled.finish()
        elif step == "pass":
            scaled.pass_time(number)
        elif step == "turns":
            await run_pending_tasks(number)
        elif step == "bounds":
            most = number
            scaled.configured.append(demo(scaled.directory, max=most))
            assert (await scaled.gateway.state.reloader.reload(wait=True)).ok
        elif engine.state is not EngineState.DRAINING:
            engine.broken = step == "give up"
            engine.state = EngineState.READY if step == "start" else EngineState.FAILED
        assert 1 <= len(scaled.engines) <= 4
    return most


def add_server(one: Scaled, number: int, state: EngineState = EngineState.READY) -> Replica:
    """Have a server discovered that has joined."""
    spec = RemoteSpec(kind="remote", url=f"http://10.0.0.{number}:8000")
    config = EngineConfig(f"demo-10.0.0.{number}-8000", spec, discovered=True)
    replica = Replica(FakeEngine(config.name, state), "demo")
    fleet = one.gateway.state.fleet
    fleet.deployments["demo"].members.append(DeployedEngine(config, replica))
    fleet.publish()
    return replica


async def test_a_server_that_is_down_does_not_hold_scaling_up(scaled: Scaled) -> None:
    add_server(scaled, 7, EngineState.FAILED)
    await scaled.ask(20)
    scaled.pass_time(3 * UP_S)
    await scaled.has("demo-0", "demo-1")


async def test_a_server_that_is_down_carries_no_load(scaled: Scaled) -> None:
    """Two engines of two requests each have three; without one of them, one waits."""
    await scaled.grow()
    await scaled.finish()
    await scaled.ask(3)
    add_server(scaled, 7, EngineState.FAILED)
    scaled.pass_time(2 * DOWN_S)
    await run_pending_tasks()
    assert sorted(scaled.engines) == ["demo-0", "demo-1"]
    assert not scaled.scaler.stepping


async def test_servers_count_by_this_gateways_part_of_their_slots(scaled: Scaled) -> None:
    """Four gateways share two servers: this one has one of their four slots, and an engine."""
    for number in (7, 8):
        add_server(scaled, number).division = 4, 0
    await scaled.ask(6)
    assert scaled.gateway.state.admission.counts("demo") == (3, 3)
    scaled.pass_time(UP_S + 1)
    await scaled.has("demo-0", "demo-1")
    await scaled.let_start()
    assert dict(scaled.scaler.wanted()) == {"demo": 4}  # the servers are engines of the model, too


async def test_a_server_that_is_ready_spares_an_engine(scaled: Scaled) -> None:
    await scaled.grow()
    await scaled.finish()
    await scaled.ask(3)
    add_server(scaled, 7)
    scaled.pass_time(DOWN_S + 1)
    await wait_until(lambda: len(scaled.engines) == 1)


async def test_a_reload_that_adds_a_server_replaces_no_engine(scaled: Scaled) -> None:
    await scaled.grow()
    ray = {"kind": "ray", "model": "/models/demo", "replicas": {"min": 1, "max": 3}}
    engines = [ray, {"kind": "remote", "url": "http://10.0.0.1:8000"}]
    model = {"name": "demo", "queue": {"max_in_flight": 2}, "engines": engines}
    scaled.configured.append(settings_for(model, run_dir=scaled.directory))
    report = await scaled.gateway.state.reloader.reload(dry_run=True, wait=True)
    assert report.difference == ("~ model demo: more engines (starts demo-2)",)
