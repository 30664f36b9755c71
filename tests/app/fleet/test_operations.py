"""Orders: one at a time for a model, owned until they are done, refused where they are none."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from app import errors
from app.fleet.operations import ModelOperations
from app.routing import Catalogue, Model, Replica
from engines.base import EngineCapabilities, EngineNotReady, EngineState
from engines.process import ProcessEngine
from tests.app.routing.fakes import FakeEngine

READY, STOPPED, FAILED, ASLEEP = (
    EngineState.READY,
    EngineState.STOPPED,
    EngineState.FAILED,
    EngineState.ASLEEP,
)


class Engine(FakeEngine):
    """An engine that does as a process does: a failed one is not started without a stop."""

    capabilities = ProcessEngine.capabilities
    cannot: str | None = None

    def __init__(self, name: str, state: EngineState = STOPPED, cannot: str | None = None) -> None:
        super().__init__(name, state, cannot=cannot)

    async def ensure_ready(self, deadline: float) -> None:
        if self.state is FAILED:
            raise EngineNotReady(self.last_error or "failed")
        if self.cannot is not None:
            raise EngineNotReady(self.cannot)
        self.state = READY

    async def unload(self) -> None:
        self.state = STOPPED

    async def sleep(self, level: int) -> None:
        if self.cannot is not None:
            raise EngineNotReady(self.cannot)
        self.state = ASLEEP


Make = Callable[..., ModelOperations]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[ModelOperations] = []

    def build(*engines: FakeEngine) -> ModelOperations:
        replicas = tuple(Replica(engine, "demo") for engine in engines)
        catalogue = Catalogue([Model("demo", ("gpt",), replicas)])
        made.append(ModelOperations(catalogue, tmp_path))
        return made[-1]

    yield build
    for orders in made:
        await orders.close()


async def test_load_starts_every_engine(make: Make) -> None:
    engines = Engine("demo-0"), Engine("demo-1", FAILED), Engine("demo-2", ASLEEP)
    await make(*engines).load("gpt")
    assert [engine.state for engine in engines] == [READY] * 3


async def test_load_tells_of_every_engine_that_did_not_start(make: Make) -> None:
    engines = (
        Engine("demo-0", cannot="no room"),
        Engine("demo-1"),
        Engine("demo-2", cannot="demo-2: x"),
    )
    with pytest.raises(errors.EngineUnavailable) as caught:
        await make(*engines).load("demo")
    assert caught.value.message == "engine demo-0: no room; demo-2: x"
    assert engines[1].state is READY


async def test_unload_and_sleep(make: Make) -> None:
    engine = Engine("demo-0", READY)
    orders = make(engine)
    await orders.sleep("demo", 1)
    assert engine.state is ASLEEP
    await orders.unload("demo")
    assert engine.state is STOPPED


@pytest.mark.parametrize(("kind", "shown"), [("remote", "remote"), ("in_process", "in process")])
async def test_what_no_engine_of_a_model_can(make: Make, kind: str, shown: str) -> None:
    orders = make(FakeEngine(kind=kind, capabilities=EngineCapabilities()))
    with pytest.raises(errors.Conflict, match=f"demo cannot be unloaded: its engines are {shown}"):
        await orders.unload("demo")
    with pytest.raises(errors.Conflict, match=f"demo cannot sleep: its engines are {shown}"):
        await orders.sleep("demo", 1)
    with pytest.raises(errors.Conflict, match=f"is {shown} and has no log of its own"):
        orders.log("demo-0")


async def test_an_engine_that_cannot_sleep_says_why(make: Make) -> None:
    orders = make(Engine("demo-0", READY, cannot="sleep mode is off"))
    with pytest.raises(errors.EngineUnavailable, match="engine demo-0: sleep mode is off"):
        await orders.sleep("demo", 2)


async def test_restart_ends_and_starts(make: Make) -> None:
    engine = Engine("demo-0", FAILED)
    await make(engine).restart("demo-0")
    assert engine.state is READY


async def test_a_remote_engine_is_not_ours_to_restart(make: Make) -> None:
    with pytest.raises(errors.Conflict, match="it is started where it runs"):
        await make(FakeEngine(capabilities=EngineCapabilities())).restart("demo-0")


async def test_names_that_there_are_not_are_answered_with_those_that_there_are(make: Make) -> None:
    orders = make(FakeEngine("demo-0"), FakeEngine("demo-1"))
    with pytest.raises(errors.ModelNotFound) as model:
        await orders.load("x" * 500)
    assert model.value.message == f"there is no model '{'x' * 100}…'; there are demo"
    with pytest.raises(errors.RouteNotFound) as engine:
        orders.log("nope")
    assert engine.value.message == "there is no engine 'nope'; there are demo-0, demo-1"


class TestOrders:
    async def test_the_same_order_twice_is_one(self, make: Make) -> None:
        orders = make()
        go = asyncio.Event()
        calls = 0

        async def work() -> None:
            nonlocal calls
            calls += 1
            await go.wait()

        first = orders.order("demo", "load", work)
        assert orders.order("demo", "load", work) is first
        assert orders.under_way("demo") == "load"
        go.set()
        await first
        assert calls == 1
        assert orders.under_way("demo") is None

    async def test_another_order_meanwhile_is_refused(self, make: Make) -> None:
        orders = make()
        go = asyncio.Event()
        first = orders.order("demo", "load", lambda: _wait(go))
        with pytest.raises(errors.Conflict, match="demo: load is under way"):
            orders.order("demo", "unload", lambda: _wait(go))
        other = orders.order("another", "unload", lambda: _wait(go))
        go.set()
        await asyncio.gather(first, other)

    async def test_an_engines_error_is_the_callers_and_tells_no_secret(self, make: Make) -> None:
        async def work() -> None:
            raise EngineNotReady("no such flag --hf-token=hf_canary0123456789")

        with pytest.raises(errors.EngineUnavailable, match=r"--hf-token=\*\*\*$"):
            await make().order("demo", "load", work)

    async def test_a_failure_that_nobody_waits_for_is_logged_and_over(
        self, make: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def work() -> None:
            raise EngineNotReady("no room")

        orders = make()
        await asyncio.wait({orders.order("demo", "load", work)})
        assert orders.under_way("demo") is None
        assert "load demo: no room" in caplog.text

    async def test_a_fault_of_our_own_leaves_its_trace(
        self, make: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def work() -> None:
            raise RuntimeError("oops")

        orders = make()
        await asyncio.wait({orders.order("demo", "load", work)})
        await asyncio.sleep(0)
        assert "load demo: a fault of the gateway's own" in caplog.text
        assert "oops" in caplog.text

    async def test_the_end_of_the_gateway_ends_them(self, make: Make) -> None:
        orders = make()
        order = orders.order("demo", "load", lambda: _wait(asyncio.Event()))
        await asyncio.sleep(0)
        await orders.close()
        assert order.cancelled()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
