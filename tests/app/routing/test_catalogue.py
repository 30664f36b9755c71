"""The catalogue: names, aliases, replicas and readiness."""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from app.errors import ModelNotFound
from app.routing.catalogue import Catalogue, Model
from app.routing.replica import Replica
from app.settings import SplitTarget
from engines.adapters import AdapterPhase, AdapterState
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


def anything(_: str) -> bool:
    return True


def adapter_of(parent: Model, name: str = "legal", source: str = "/loras/legal") -> Model:
    return replace(parent, name=name, aliases=(), parent=parent.name, adapter_source=source)


class TestAdapters:
    def test_replicas_that_have_loaded_it_can_serve_it(self) -> None:
        demo = model(states=[EngineState.READY] * 3)
        legal = adapter_of(demo)
        sources = {"demo-0": "/loras/legal", "demo-1": "/loras/other"}
        for replica in demo.replicas:
            if (source := sources.get(replica.engine.name)) is not None:
                loaded = AdapterState(source, AdapterPhase.LOADED)
                replica.engine._status.note_adapter("legal", loaded)
        assert [replica.engine.name for replica in legal.able] == ["demo-0"]
        assert (legal.ready, demo.ready) == (1, 3)
        assert legal.is_loading_adapter  # demo-1 is about to have it from there

    @pytest.mark.parametrize("phase", AdapterPhase)
    def test_it_is_waited_for_while_an_engine_loads_it(self, phase: AdapterPhase) -> None:
        demo = model()
        demo.replicas[0].engine._status.note_adapter("legal", AdapterState("/loras/legal", phase))
        assert adapter_of(demo).is_loading_adapter == (phase is AdapterPhase.LOADING)
        assert not demo.is_loading_adapter

    def test_engines_are_those_of_the_models(self) -> None:
        demo = model(states=[EngineState.READY] * 2)
        catalogue = Catalogue([demo, adapter_of(demo)])
        assert [engine.name for engine in catalogue.engines] == ["demo-0", "demo-1"]
        assert catalogue.find_replica("demo-1")[0] is demo
        assert catalogue.find("legal", anything).base == "demo"


class TestNames:
    def test_model_is_found_by_its_name_and_each_alias(self) -> None:
        demo, other = model("demo", ["gpt-4o-mini", "small"]), model("other")
        catalogue = Catalogue([demo, other])
        for name in ("demo", "gpt-4o-mini", "small"):
            assert catalogue.find(name, anything) is demo
        assert catalogue.find("other", anything) is other

    @pytest.mark.parametrize("name", ["Demo", "demo ", "", "dem", "demo\x00", "nobody"])
    def test_near_miss_of_a_name_is_not_found(self, name: str) -> None:
        with pytest.raises(ModelNotFound) as caught:
            Catalogue([model("demo")]).find(name, anything)
        assert repr(name) in caught.value.message
        assert (caught.value.status, caught.value.param) == (404, "model")

    @pytest.mark.parametrize("name", ["x" * 1_000_000, "\x00" * 5000, "😀" * 5000])
    def test_error_for_an_unknown_name_is_bounded(self, name: str) -> None:
        with pytest.raises(ModelNotFound) as caught:
            Catalogue([]).find(name, anything)
        assert len(caught.value.message) < 600

    def test_long_name_is_truncated_in_the_error(self) -> None:
        with pytest.raises(ModelNotFound, match=r"x{100}…"):
            Catalogue([]).find("x" * 101, anything)
        with pytest.raises(ModelNotFound, match=r"'x{100}'"):
            Catalogue([]).find("x" * 100, anything)

    def test_model_that_is_not_allowed_has_the_same_error_as_an_unknown_one(self) -> None:
        catalogue = Catalogue([model("demo", ["small"])])
        for name in ("demo", "small"):
            with pytest.raises(ModelNotFound) as caught:
                catalogue.find(name, lambda allowed: allowed != "demo")
            with pytest.raises(ModelNotFound) as unknown:
                Catalogue([]).find(name, anything)
            assert caught.value.message == unknown.value.message

    def test_permission_is_checked_by_the_canonical_name(self) -> None:
        demo = model("demo", ["small"])
        assert Catalogue([demo]).find("small", lambda name: name == "demo") is demo

    def test_line_break_in_a_name_is_escaped(self) -> None:
        with pytest.raises(ModelNotFound) as caught:
            Catalogue([]).find("a\nINFO forged\r\x1b[31m", anything)
        assert caught.value.message.isprintable()

    def test_error_does_not_list_other_models(self) -> None:
        with pytest.raises(ModelNotFound) as caught:
            Catalogue([model("internal-model")]).find("guess", anything)
        assert "internal-model" not in caught.value.message

    def test_every_name_is_listed_with_its_model(self) -> None:
        demo, other = model("demo", ["alias"]), model("other")
        listed = list(Catalogue([demo, other]).names())
        assert [name for name, _ in listed] == ["demo", "alias", "other"]
        assert [one for _, one in listed] == [demo, demo, other]

    def test_model_has_its_creation_time(self) -> None:
        before = int(time.time())
        assert before <= model().created <= time.time()


class TestReplace:
    def test_replace_makes_new_models_found_and_old_ones_not(self) -> None:
        catalogue = Catalogue([model("demo", ["a"]), model("old")])
        demo = model("demo", ["b"])
        catalogue.replace([demo, model("new")])
        assert catalogue.find("b", anything) is demo
        assert [name for name, _ in catalogue.names()] == ["demo", "b", "new"]
        for name in ("a", "old"):
            with pytest.raises(ModelNotFound):
                catalogue.find(name, anything)

    def test_current_returns_the_present_version(self) -> None:
        before, gone = model("demo", ["x"]), model("x")
        catalogue = Catalogue([model("demo"), gone])
        now = model("demo", ["x"])
        catalogue.replace([now])
        assert catalogue.current(before) is now
        assert catalogue.current(gone) is gone, "not another that answers to its name"

    def test_one_that_is_gone_has_the_slots_of_one_engine(self) -> None:
        catalogue = Catalogue([model("demo", states=[EngineState.READY] * 2)])
        assert catalogue.count_slots("demo", 3) == 6
        catalogue.replace([])
        assert catalogue.count_slots("demo", 3) == 3


class TestOwnName:
    def test_no_model_answers_to_an_alias(self) -> None:
        catalogue = Catalogue([model("demo", ["x"])])
        assert catalogue.get("demo") is catalogue.models[0]
        assert catalogue.get("x") is None

    def test_models_are_as_they_are_now(self) -> None:
        catalogue = Catalogue([model("gone"), model("small")])
        small = model("small")
        catalogue.replace([small, model("other", ["gone"])])
        assert catalogue.get("small") is small
        assert catalogue.get("gone") is None, "not another that answers to its name"


class TestReady:
    @pytest.mark.parametrize("state", EngineState)
    def test_only_ready_engines_count(self, state: EngineState) -> None:
        one = model(states=[state, EngineState.READY, state])
        assert one.ready == (3 if state is EngineState.READY else 1)

    def test_catalogue_is_ready_with_its_first_ready_engine(self) -> None:
        waiting = model("a", states=[EngineState.STARTING, EngineState.FAILED])
        assert not Catalogue([waiting]).ready
        assert Catalogue([waiting, model("b")]).ready

    def test_empty_catalogue_is_not_ready(self) -> None:
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

    def test_engines_are_in_the_order_of_the_models(self) -> None:
        ready = [EngineState.READY] * 2
        engines = Catalogue([model("a", states=ready), model("b", states=ready)]).engines
        assert [engine.name for engine in engines] == ["a-0", "a-1", "b-0", "b-1"]


class TestLength:
    @pytest.mark.parametrize(
        ("lengths", "expected"),
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
    def test_length_is_the_smallest_known(
        self, lengths: list[int | None], expected: int | None
    ) -> None:
        states = [EngineState.READY] * len(lengths)
        assert model(states=states, lengths=lengths).max_model_len == expected


class TestReplica:
    def test_replicas_compare_by_identity(self) -> None:
        engine = FakeEngine()
        assert Replica(engine, "demo") != Replica(engine, "demo")


def test_split_without_engines_has_none_of_a_model_without_a_share() -> None:
    """What it would send there would be served without that model's rules, limits and price."""
    paused = model("paused")
    split = (SplitTarget(model="absent", weight=1), SplitTarget(model="paused", weight=0))
    catalogue = Catalogue([paused, Model("chat", (), (), split=split, engineless=True)])
    chat = catalogue.get("chat")
    assert chat is not None
    assert chat.replicas == ()
