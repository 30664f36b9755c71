"""Actions on models and engines: when they are possible, and what they say of requests."""

import pytest

from app.console.actions import ModelAbilities, engine_actions, model_actions
from app.fleet import EngineRow, ModelRow
from engines.base import EngineFacts, EngineState

UNLOADABLE = ModelAbilities(unloadable=True)


def model_row(state: EngineState = EngineState.READY, **fields: object) -> ModelRow:
    """Return the row of a model with one engine."""
    row = ModelRow(
        name="org/m", aliases=[], load="eager", state=state, engines=1,
        ready=int(state is EngineState.READY), in_flight=0, waiting=0, under_way=None,
        loading=None, last_error=None,
    )  # fmt: skip
    return row.model_copy(update=fields)


def engine_row(in_flight: int) -> EngineRow:
    """Return the row of an engine that is ready."""
    return EngineRow(
        name="m-0", model="m", kind="process", state=EngineState.READY, since=None, progress=None,
        facts=EngineFacts(), last_error=None, restarts=0, load_s=None, in_flight=in_flight,
        pid=None, memory_gib=None, runs="vllm",
    )  # fmt: skip


def labels(row: ModelRow, abilities: ModelAbilities) -> list[str]:
    return [action.label for action in model_actions(row, abilities)]


@pytest.mark.parametrize(
    ("state", "abilities", "expected"),
    [
        (EngineState.READY, UNLOADABLE, ["Unload"]),
        (EngineState.STOPPED, UNLOADABLE, ["Load"]),
        (EngineState.FAILED, UNLOADABLE, ["Load", "Unload"]),
        (EngineState.READY, ModelAbilities(unloadable=False), []),
        (EngineState.READY, ModelAbilities(unloadable=True, sleep_level=1), ["Sleep", "Unload"]),
        (EngineState.ASLEEP, ModelAbilities(unloadable=True, asleep=True), ["Wake", "Unload"]),
    ],
)
def test_only_possible_actions_are_offered(
    state: EngineState, abilities: ModelAbilities, expected: list[str]
) -> None:
    assert labels(model_row(state), abilities) == expected


def test_nothing_is_offered_while_an_operation_is_under_way() -> None:
    assert labels(model_row(under_way="unload"), UNLOADABLE) == []


def test_the_path_names_the_model_and_the_level_of_sleep() -> None:
    sleep, unload = model_actions(
        model_row(name="org/m?x"), ModelAbilities(unloadable=True, sleep_level=2)
    )
    assert sleep.path == "/admin/models/org/m%3Fx/sleep?level=2"
    assert unload.path == "/admin/models/org/m%3Fx/unload"


def test_an_unload_says_what_happens_to_requests_in_flight() -> None:
    (idle,) = model_actions(model_row(), UNLOADABLE)
    assert "No request is in flight." in idle.confirm
    (busy,) = model_actions(model_row(in_flight=1), UNLOADABLE)
    assert "1 request is in flight: the engines wait until they have finished." in busy.confirm
    mixed = ModelAbilities(unloadable=True, others_stay=True)
    (moving,) = model_actions(model_row(in_flight=2), mixed)
    assert "2 requests are in flight: streams go on at the engines that stay" in moving.confirm


def test_an_unload_says_what_happens_to_requests_afterwards() -> None:
    (eager,) = model_actions(model_row(load="eager"), UNLOADABLE)
    assert eager.confirm.endswith("are refused, or go to its fallbacks, until it is loaded again.")
    (on_demand,) = model_actions(model_row(load="on_demand"), UNLOADABLE)
    assert on_demand.confirm.endswith("A new request for the model loads it again.")


def test_a_restart_says_which_requests_end() -> None:
    (idle,) = engine_actions(engine_row(0), managed=True, continues=True)
    assert "No request is in flight" in idle.confirm
    (moving,) = engine_actions(engine_row(3), managed=True, continues=True)
    assert "go on at another engine" in moving.confirm
    (ending,) = engine_actions(engine_row(3), managed=True, continues=False)
    assert "3 requests are in flight on it: all end with an error." in ending.confirm


def test_an_engine_elsewhere_has_no_actions() -> None:
    assert engine_actions(engine_row(0), managed=False, continues=True) == []
