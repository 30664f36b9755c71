"""Names, replicas behind them, and leases that always come back."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from app.errors import ModelNotFound
from app.routing.catalogue import Catalogue, Model, Replica
from engines.base import EngineFacts, EngineState
from tests.app.routing.fakes import FakeEngine


def model(
    name: str = "demo",
    aliases: Sequence[str] = (),
    states: Sequence[EngineState] = (EngineState.READY,),
    lengths: Sequence[int | None] = (),
) -> Model:
    engines = [FakeEngine(f"{name}-{number}", state) for number, state in enumerate(states)]
    for engine, length in zip(engines, lengths, strict=False):
        engine.facts = EngineFacts(max_model_len=length)
    return Model(name, tuple(aliases), tuple(Replica(engine, name) for engine in engines))


class TestNames:
    def test_a_model_is_found_by_its_name_and_each_alias(self) -> None:
        demo, other = model("demo", ["gpt-4o-mini", "small"]), model("other")
        catalogue = Catalogue([demo, other])
        for name in ("demo", "gpt-4o-mini", "small"):
            assert catalogue.find(name) is demo
        assert catalogue.find("other") is other

    @pytest.mark.parametrize("name", ["Demo", "demo ", "", "dem", "demo\x00", "nobody"])
    def test_what_is_not_exactly_a_name_is_not_found(self, name: str) -> None:
        with pytest.raises(ModelNotFound) as caught:
            Catalogue([model("demo")]).find(name)
        assert repr(name) in caught.value.message
        assert (caught.value.status, caught.value.param) == (404, "model")

    @pytest.mark.parametrize("name", ["x" * 1_000_000, "\x00" * 5000, "😀" * 5000])
    def test_the_message_for_an_unknown_name_is_bounded(self, name: str) -> None:
        with pytest.raises(ModelNotFound) as caught:
            Catalogue([]).find(name)
        assert len(caught.value.message) < 600

    def test_a_long_name_is_shown_by_its_beginning(self) -> None:
        with pytest.raises(ModelNotFound, match=r"x{100}…"):
            Catalogue([]).find("x" * 101)
        with pytest.raises(ModelNotFound, match=r"'x{100}'"):
            Catalogue([]).find("x" * 100)

    def test_a_line_break_in_a_name_does_not_break_the_line(self) -> None:
        with pytest.raises(ModelNotFound) as caught:
            Catalogue([]).find("a\nINFO forged\r\x1b[31m")
        assert caught.value.message.isprintable()

    def test_the_message_does_not_name_other_models(self) -> None:
        with pytest.raises(ModelNotFound) as caught:
            Catalogue([model("internal-model")]).find("guess")
        assert "internal-model" not in caught.value.message

    def test_every_name_is_listed_with_its_model(self) -> None:
        demo, other = model("demo", ["alias"]), model("other")
        listed = list(Catalogue([demo, other]).names())
        assert [name for name, _ in listed] == ["demo", "alias", "other"]
        assert [one for _, one in listed] == [demo, demo, other]

    def test_a_model_knows_since_when_it_is_there(self) -> None:
        assert abs(model().created - time.time()) <= 2


class TestReady:
    @pytest.mark.parametrize("state", EngineState)
    def test_only_ready_engines_count(self, state: EngineState) -> None:
        one = model(states=[state, EngineState.READY, state])
        assert one.ready == (3 if state is EngineState.READY else 1)

    def test_a_catalogue_is_ready_with_its_first_ready_engine(self) -> None:
        waiting = model("a", states=[EngineState.STARTING, EngineState.FAILED])
        assert not Catalogue([waiting]).ready
        assert Catalogue([waiting, model("b")]).ready

    def test_an_empty_catalogue_is_not_ready(self) -> None:
        assert not Catalogue([]).ready
        assert Catalogue([]).engines == []

    def test_ready_follows_the_engines(self) -> None:
        engine = FakeEngine(state=EngineState.STARTING)
        one = Model("demo", (), (Replica(engine, "demo"),))
        assert one.ready == 0
        engine.state = EngineState.READY
        assert one.ready == 1
        engine.state = EngineState.DRAINING
        assert one.ready == 0

    def test_engines_are_those_of_all_models_in_order(self) -> None:
        ready = [EngineState.READY] * 2
        engines = Catalogue([model("a", states=ready), model("b", states=ready)]).engines
        assert [engine.name for engine in engines] == ["a-0", "a-1", "b-0", "b-1"]


class TestLength:
    @pytest.mark.parametrize(
        ("lengths", "wanted"),
        [
            ([], None),
            ([None], None),
            ([None, None], None),
            ([4096], 4096),
            ([4096, 2048], 2048),
            ([None, 4096], 4096),
            ([8192, None, 1024, 4096], 1024),
        ],
    )
    def test_the_length_is_the_smallest_that_is_known(
        self, lengths: list[int | None], wanted: int | None
    ) -> None:
        states = [EngineState.READY] * len(lengths)
        assert model(states=states, lengths=lengths).max_model_len == wanted


class TestLease:
    async def test_a_lease_counts_while_it_is_held(self) -> None:
        replica = Replica(FakeEngine(), "demo")
        lease = replica.lease()
        assert replica.in_flight == 0
        async with lease as held:
            assert held.replica is replica
            assert replica.in_flight == 1
            async with replica.lease():
                assert replica.in_flight == 2
            assert replica.in_flight == 1
        assert replica.in_flight == 0

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
    async def test_an_error_gives_the_lease_back_and_goes_on(
        self, error: type[BaseException]
    ) -> None:
        replica = Replica(FakeEngine(), "demo")
        with pytest.raises(error):
            async with replica.lease():
                raise error
        assert replica.in_flight == 0

    async def test_cancellation_gives_the_lease_back(self) -> None:
        replica = Replica(FakeEngine(), "demo")
        held = asyncio.Event()

        async def request() -> None:
            async with replica.lease():
                held.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(request())
        await held.wait()
        assert replica.in_flight == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert replica.in_flight == 0

    async def test_cancellation_before_the_first_step_takes_no_lease(self) -> None:
        replica = Replica(FakeEngine(), "demo")

        async def request() -> None:
            async with replica.lease():
                await asyncio.Event().wait()

        task = asyncio.create_task(request())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert replica.in_flight == 0

    async def test_a_storm_of_requests_leaves_nothing_behind(self) -> None:
        replica = Replica(FakeEngine(), "demo")
        peak = 0

        async def request(number: int) -> None:
            nonlocal peak
            async with replica.lease():
                peak = max(peak, replica.in_flight)
                await asyncio.sleep(0)
                if number % 3 == 0:
                    raise ValueError(number)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(request(number)) for number in range(90)]
        await asyncio.sleep(0)
        for task in tasks[1::3]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(one, ValueError) for one in done) == 30
        assert sum(isinstance(one, asyncio.CancelledError) for one in done) == 30
        assert peak == 90
        assert replica.in_flight == 0

    def test_replicas_are_told_apart_by_identity(self) -> None:
        engine = FakeEngine()
        assert Replica(engine, "demo") != Replica(engine, "demo")
