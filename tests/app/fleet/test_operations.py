"""Operations on models: one at a time each, not canceled with their caller."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from app import errors
from app.fleet.moves import POLL_S
from app.fleet.operations import ModelOperations
from app.routing import Catalogue, Model, Replica
from engines.base import EngineCapabilities, EngineFacts, EngineNotReady, EngineState
from engines.process import ProcessEngine
from tests.app.fleet.streams import FakeStream
from tests.app.routing.fakes import FakeEngine
from tests.waiting import wait_until

READY, STOPPED, FAILED, ASLEEP = (
    EngineState.READY,
    EngineState.STOPPED,
    EngineState.FAILED,
    EngineState.ASLEEP,
)


class Engine(FakeEngine):
    """A fake that behaves as a process: a failed one does not start before a stop."""

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
    for operations in made:
        await operations.close()


async def test_load_starts_every_engine(make: Make) -> None:
    engines = Engine("demo-0"), Engine("demo-1", FAILED), Engine("demo-2", ASLEEP)
    await make(*engines).load("gpt")
    assert [engine.state for engine in engines] == [READY] * 3


async def test_load_error_has_every_engine_that_failed(make: Make) -> None:
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
    operations = make(engine)
    await operations.sleep("demo", 1)
    assert engine.state is ASLEEP
    await operations.unload("demo")
    assert engine.state is STOPPED


@pytest.mark.parametrize(("kind", "shown"), [("remote", "remote"), ("in_process", "in process")])
async def test_operation_that_no_engine_supports_is_a_conflict(
    make: Make, kind: str, shown: str
) -> None:
    operations = make(FakeEngine(kind=kind, capabilities=EngineCapabilities()))
    with pytest.raises(errors.Conflict, match=f"demo cannot be unloaded: its engines are {shown}"):
        await operations.unload("demo")
    with pytest.raises(errors.Conflict, match=f"demo cannot sleep: its engines are {shown}"):
        await operations.sleep("demo", 1)
    with pytest.raises(errors.Conflict, match=f"is {shown} and has no log of its own"):
        operations.open_log("demo-0")


async def test_sleep_error_has_the_reason(make: Make) -> None:
    operations = make(Engine("demo-0", READY, cannot="sleep mode is off"))
    with pytest.raises(errors.EngineUnavailable, match="engine demo-0: sleep mode is off"):
        await operations.sleep("demo", 2)


async def test_restart_stops_and_starts(make: Make) -> None:
    engine = Engine("demo-0", FAILED)
    await make(engine).restart("demo-0")
    assert engine.state is READY


async def test_restart_of_a_remote_engine_is_a_conflict(make: Make) -> None:
    with pytest.raises(errors.Conflict, match="it is started where it runs"):
        await make(FakeEngine(capabilities=EngineCapabilities())).restart("demo-0")


async def test_error_for_an_unknown_name_lists_the_names(make: Make) -> None:
    operations = make(FakeEngine("demo-0"), FakeEngine("demo-1"))
    with pytest.raises(errors.ModelNotFound) as model:
        await operations.load("x" * 500)
    assert model.value.message == f"there is no model '{'x' * 100}…'; there are demo"
    with pytest.raises(errors.RouteNotFound) as engine:
        operations.open_log("nope")
    assert engine.value.message == "there is no engine 'nope'; there are demo-0, demo-1"


class Busy(Engine):
    """An engine that drains until its test says so, as one with a request in flight."""

    def __init__(self, name: str, version: str = "0.32.0", **attributes: object) -> None:
        super().__init__(name, READY)
        self.quiet = asyncio.Event()
        self.facts = EngineFacts(version=version)
        for attribute, value in attributes.items():
            setattr(self, attribute, value)

    async def unload(self) -> None:
        self.state = EngineState.DRAINING
        await self.quiet.wait()
        self.state = STOPPED

    async def sleep(self, level: int) -> None:
        await self.unload()
        self.state = ASLEEP

    async def stop(self, grace: float) -> None:
        self.state = EngineState.STOPPING
        await self.quiet.wait()
        self.state = STOPPED


REMOTE = EngineCapabilities()


class TestMoves:
    async def test_restart_moves_streams_before_it_stops_the_engine(self, make: Make) -> None:
        engine = Busy("demo-0")
        operations = make(engine)
        [replica] = operations._catalogue.models[0].replicas
        states: list[EngineState] = []
        stream = FakeStream(replica, lambda: states.append(engine.state))
        restarting = asyncio.create_task(operations.restart("demo-0"))
        await wait_until(lambda: engine.state is EngineState.STOPPING)
        assert (stream.moves, states) == (1, [READY])
        engine.quiet.set()
        await restarting
        assert engine.state is READY
        assert stream.moves == 1

    async def test_second_restart_moves_only_what_has_begun_since(self, make: Make) -> None:
        engine = Busy("demo-0")
        operations = make(engine)
        [replica] = operations._catalogue.models[0].replicas
        first = FakeStream(replica)
        stops = [asyncio.create_task(operations.restart("demo-0"))]
        await wait_until(lambda: first.moves)
        second = FakeStream(replica)  # its request was sent before the stop
        stops.append(asyncio.create_task(operations.restart("demo-0")))
        await wait_until(lambda: second.moves)
        engine.quiet.set()
        await asyncio.gather(*stops)
        assert (first.moves, second.moves) == (1, 1)

    @pytest.mark.parametrize("action", ["unload", "sleep"])
    async def test_streams_move_to_an_engine_that_stays(self, make: Make, action: str) -> None:
        engine, other = Busy("demo-0"), Busy("demo-1", capabilities=REMOTE)
        operations = make(engine, other)
        replica, stays = operations._catalogue.models[0].replicas
        stream, elsewhere = FakeStream(replica, engine.quiet.set), FakeStream(stays)
        await _act(operations, action)
        assert (stream.moves, elsewhere.moves) == (1, 0)

    @pytest.mark.parametrize("action", ["unload", "sleep"])
    @pytest.mark.parametrize(
        "others",
        [
            (),
            ({"name": "demo-1"},),  # leaves as well
            ({"name": "demo-1", "version": "0.33.0", "capabilities": REMOTE},),
            ({"name": "demo-1", "capabilities": REMOTE, "state": FAILED},),
        ],
    )
    async def test_streams_finish_where_no_other_engine_can_go_on(
        self, make: Make, action: str, others: tuple[dict[str, Any], ...]
    ) -> None:
        engines = [Busy("demo-0"), *(Busy(**fields) for fields in others)]
        operations = make(*engines)
        stream = FakeStream(operations._catalogue.models[0].replicas[0])
        acting = asyncio.create_task(_act(operations, action))
        await wait_until(lambda: engines[0].state is EngineState.DRAINING)
        await asyncio.sleep(2.5 * POLL_S)
        assert stream.moves == 0
        for engine in engines:
            engine.quiet.set()
        await acting
        assert stream.moves == 0

    async def test_canceled_unload_moves_nothing_more(self, make: Make) -> None:
        engine, other = Busy("demo-0"), Busy("demo-1", capabilities=REMOTE)
        operations = make(engine, other)
        replica, _ = operations._catalogue.models[0].replicas
        unloading = asyncio.create_task(operations.unload("demo"))
        await wait_until(lambda: engine.state is EngineState.DRAINING)
        unloading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unloading
        stream = FakeStream(replica)
        await asyncio.sleep(1.5 * POLL_S)
        assert stream.moves == 0


async def _act(operations: ModelOperations, action: str) -> None:
    if action == "unload":
        await operations.unload("demo")
    else:
        await operations.sleep("demo", 1)


class TestOrders:
    async def test_same_operation_twice_is_one(self, make: Make) -> None:
        operations = make()
        go = asyncio.Event()
        calls = 0

        async def work() -> None:
            nonlocal calls
            calls += 1
            await go.wait()

        first = operations.start("demo", "load", work)
        assert operations.start("demo", "load", work) is first
        assert operations.under_way("demo") == "load"
        go.set()
        await first
        assert calls == 1
        assert operations.under_way("demo") is None

    async def test_other_operation_meanwhile_is_a_conflict(self, make: Make) -> None:
        operations = make()
        go = asyncio.Event()
        first = operations.start("demo", "load", lambda: _wait(go))
        with pytest.raises(errors.Conflict, match="demo: load is under way"):
            operations.start("demo", "unload", lambda: _wait(go))
        other = operations.start("another", "unload", lambda: _wait(go))
        go.set()
        await asyncio.gather(first, other)

    async def test_engine_error_becomes_the_callers_without_secrets(self, make: Make) -> None:
        async def work() -> None:
            raise EngineNotReady("no such flag --hf-token=hf_canary0123456789")

        with pytest.raises(errors.EngineUnavailable, match=r"--hf-token=\*\*\*$"):
            await make().start("demo", "load", work)

    async def test_failure_without_a_waiting_caller_is_logged(
        self, make: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def work() -> None:
            raise EngineNotReady("no room")

        operations = make()
        await asyncio.wait({operations.start("demo", "load", work)})
        assert operations.under_way("demo") is None
        assert "load demo failed: no room" in caplog.text

    async def test_unhandled_exception_is_logged_with_its_traceback(
        self, make: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def work() -> None:
            raise RuntimeError("oops")

        operations = make()
        await asyncio.wait({operations.start("demo", "load", work)})
        await asyncio.sleep(0)
        assert "unhandled exception in load demo" in caplog.text
        assert "oops" in caplog.text

    async def test_close_cancels_operations(self, make: Make) -> None:
        operations = make()
        operation = operations.start("demo", "load", lambda: _wait(asyncio.Event()))
        await asyncio.sleep(0)
        await operations.close()
        assert operation.cancelled()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
