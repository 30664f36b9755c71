"""Which streams leave an engine that is going to stop, and when."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from app.fleet import EngineConfig, ModelDeployment
from app.fleet.deployment import DeployedEngine
from app.fleet.moves import (
    can_move_within,
    can_wait_for,
    gives_same_answers,
    has_alternative,
    move_streams,
    moving_streams,
)
from app.routing import Replica
from app.settings import ModelSettings
from engines.adapters import AdapterPhase, AdapterState
from engines.base import EngineFacts, EngineState
from engines.spec import ProcessSpec, RemoteSpec
from tests.app.fleet.streams import FakeStream
from tests.app.routing.fakes import FakeEngine
from tests.waiting import wait_until

FACTS = EngineFacts(version="0.32.0", model="m", max_model_len=2048)
OTHERS = [
    EngineFacts(version="0.33.0", model="m", max_model_len=2048),
    EngineFacts(version="0.32.0", model="m", max_model_len=4096),
    EngineFacts(version="0.32.0", model="other", max_model_len=2048),
    EngineFacts(),
]


def replica(name: str = "demo-0", **attributes: Any) -> Replica:
    return Replica(FakeEngine(name, **{"facts": FACTS, **attributes}), "demo")


def config(name: str = "demo-0", model: str = "m", **args: Any) -> EngineConfig:
    spec = ProcessSpec.model_validate({"kind": "process", "model": model, "args": args})
    return EngineConfig(name, spec)


def deployment(*engines: DeployedEngine, **fields: Any) -> ModelDeployment:
    spec = {"kind": "process", "model": "m"}
    settings = ModelSettings.model_validate({"name": "demo", "engines": [spec], **fields})
    return ModelDeployment(settings, list(engines))


def deployed(name: str = "demo-0", args: dict[str, Any] | None = None, **attributes: Any) -> Any:
    return DeployedEngine(config(name, **(args or {})), replica(name, **attributes))


class TestWhoCanGoOn:
    def test_ready_engine_with_the_same_facts(self) -> None:
        old = replica()
        assert has_alternative(old, (old, replica("demo-1")))

    @pytest.mark.parametrize("facts", OTHERS)
    def test_no_engine_with_other_facts(self, facts: EngineFacts) -> None:
        assert not has_alternative(replica(), (replica("demo-1", facts=facts),))

    @pytest.mark.parametrize("state", [one for one in EngineState if one is not EngineState.READY])
    def test_no_engine_that_is_not_ready(self, state: EngineState) -> None:
        assert not has_alternative(replica(), (replica("demo-1", state=state),))

    def test_engine_with_the_adapters_of_streams(self) -> None:
        old, other = replica(), replica("demo-1")
        loaded = AdapterState("/loras/legal", AdapterPhase.LOADED)
        old.engine._status.note_adapter("legal", loaded)
        old.engine._status.note_adapter("bad", replace(loaded, phase=AdapterPhase.FAILED))
        assert not has_alternative(old, (other,))
        other.engine._status.note_adapter("legal", loaded)
        assert has_alternative(old, (other,))

    def test_not_the_engine_itself(self) -> None:
        old = replica()
        assert not has_alternative(old, (old,))

    def test_engine_of_the_model_with_the_same_answers(self) -> None:
        old = deployed()
        assert can_move_within(deployment(old, deployed("demo-1")), old)

    def test_engine_that_has_left_the_catalogue_can_move_to_its_successor(self) -> None:
        assert can_move_within(deployment(deployed("demo-1")), deployed())

    def test_not_while_an_engine_that_may_be_chosen_answers_otherwise(self) -> None:
        """Facts do not tell templates apart, and the stream chooses by facts."""
        old, other = deployed(), deployed("demo-1", {"chat-template": "other.jinja"})
        assert not can_move_within(deployment(old, other), old)
        assert not can_move_within(deployment(old, other, deployed("demo-2")), old)

    def test_engine_with_other_facts_is_no_obstacle(self) -> None:
        old, same = deployed(), deployed("demo-1")
        longer = deployed("demo-2", {"max-model-len": 4096}, facts=OTHERS[1])
        assert can_move_within(deployment(old, longer, same), old)


class TestSameAnswers:
    @pytest.mark.parametrize(
        "args", [{"max-num-seqs": 8}, {"gpu-memory-utilization": 0.5}, {"enforce-eager": True}]
    )
    def test_flags_of_speed_and_size_may_differ(self, args: dict[str, Any]) -> None:
        assert gives_same_answers(config(), config(**args))

    @pytest.mark.parametrize(
        "args",
        [
            {"max-model-len": 4096},
            {"chat-template": "x.jinja"},
            {"hf-overrides.rope_theta": 1},
            {"reasoning-parser": "qwen3"},
            {"dtype": "float32"},
        ],
    )
    def test_flags_of_the_answer_may_not(self, args: dict[str, Any]) -> None:
        assert not gives_same_answers(config(), config(**args))
        assert not gives_same_answers(config(**args), config())

    def test_other_model_answers_otherwise(self) -> None:
        assert not gives_same_answers(config(), config(model="other"))

    def test_remote_server_is_judged_by_its_facts(self) -> None:
        remote = EngineConfig("demo-1", RemoteSpec(kind="remote", url="http://other"))
        assert gives_same_answers(config(), remote)


class TestWaitForTheSuccessor:
    def test_load_within_the_wait(self) -> None:
        old = deployed(load_s=100.0)
        assert can_wait_for(deployment(old), old, config(), 30.0)

    @pytest.mark.parametrize("load_s", [None, 121.0])
    def test_not_for_a_load_that_is_long_or_unknown(self, load_s: float | None) -> None:
        old = deployed(load_s=load_s)
        assert not can_wait_for(deployment(old), old, config(), 30.0)

    def test_not_for_a_successor_with_other_answers(self) -> None:
        old = deployed(load_s=1.0)
        assert not can_wait_for(deployment(old), old, config(model="other"), 30.0)

    def test_requests_that_cannot_move_hold_the_successor_up(self) -> None:
        old = deployed(load_s=100.0)
        FakeStream(old.replica)
        old.replica.in_flight = 1
        assert can_wait_for(deployment(old), old, config(), 30.0)
        old.replica.in_flight = 2
        assert not can_wait_for(deployment(old), old, config(), 30.0)
        assert can_wait_for(deployment(old), old, config(), 20.0)

    def test_wait_is_the_models(self) -> None:
        old = deployed(load_s=100.0)
        assert not can_wait_for(deployment(old, continuation_wait_s=50), old, config(), 0.0)


class TestMove:
    def test_stream_moves_once(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        one = replica()
        streams = [FakeStream(one) for _ in range(3)]
        move_streams(one, "it is restarted")
        move_streams(one, "it is restarted")
        assert [stream.moves for stream in streams] == [1, 1, 1]
        assert caplog.messages == ["engine demo-0: 3 streams move: it is restarted"]

    def test_stream_that_begins_during_a_move_is_kept(self) -> None:
        one = replica()
        begun: list[FakeStream] = []
        FakeStream(one, lambda: begun.append(FakeStream(one)))
        assert one.move_streams() == 1
        assert one.streams == set(begun)
        assert begun[0].moves == 0

    async def test_streams_move_as_soon_as_they_can(self) -> None:
        one, possible = replica(), False
        first = FakeStream(one)
        async with moving_streams(one, lambda: possible, "it is replaced"):
            await asyncio.sleep(0)
            assert first.moves == 0
            possible = True
            await wait_until(lambda: first.moves)
            second = FakeStream(one)  # its request was there before the drain
            await wait_until(lambda: second.moves)
        assert (first.moves, second.moves) == (1, 1)

    async def test_nothing_moves_after_the_body(self) -> None:
        one = replica()
        async with moving_streams(one, lambda: True, "it is replaced"):
            pass
        await _check_nothing_moves(one)

    async def test_nothing_moves_after_a_canceled_body(self) -> None:
        one, entered = replica(), asyncio.Event()

        async def drain() -> None:
            async with moving_streams(one, lambda: True, "it is replaced"):
                entered.set()
                await asyncio.Event().wait()

        draining = asyncio.create_task(drain())
        await entered.wait()
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        await _check_nothing_moves(one)


async def _check_nothing_moves(one: Replica) -> None:
    late = FakeStream(one)
    await wait_until(lambda: not any(_is_mover(task) for task in asyncio.all_tasks()))
    assert late.moves == 0


def _is_mover(task: asyncio.Task[Any]) -> bool:
    return task.get_name().startswith("move ")
