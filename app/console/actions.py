"""The actions on models and engines: which are possible now, and what each does to requests. Pure.

A confirmation says how many requests are in flight, and whether they finish, move or end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from app.fleet import EngineRow, ModelRow
from engines.base import EngineState

_AFTER_UNLOAD = {
    "on_demand": "A new request for the model loads it again.",
    "eager": "Requests for it are refused, or go to its fallbacks, until it is loaded again.",
}


@dataclass(frozen=True, slots=True)
class Action:
    """A button: a POST to the admin API after a confirmation."""

    label: str
    path: str
    title: str
    confirm: str
    done: str
    danger: bool = False


@dataclass(frozen=True, slots=True)
class ModelAbilities:
    """What the engines of a model can do."""

    unloadable: bool
    # Engines that cannot be unloaded, and so take over the streams of those that can.
    others_stay: bool = False
    # Of vLLM's sleep mode, as configured; None: no engine of the model has it.
    sleep_level: int | None = None
    # Some engine sleeps.
    asleep: bool = False
    own_engines: bool = True


def model_actions(row: ModelRow, abilities: ModelAbilities) -> list[Action]:
    """Return the actions on a model; none while an operation on it is running.

    An adapter and a split without engines have none: their engines are other models'.
    """
    if row.under_way is not None or not abilities.own_engines:
        return []
    return [
        *_load_actions(row, abilities),
        *_sleep_actions(row, abilities),
        *_unload_actions(row, abilities),
    ]


def engine_actions(row: EngineRow, *, managed: bool, continues: bool) -> list[Action]:
    """Return the actions on an engine.

    `managed`: the gateway starts it. `continues`: interrupted streams of its model go on.
    """
    if not managed:
        return []
    if row.in_flight == 0:
        effect = "No request is in flight on it."
    elif continues:
        effect = (
            f"{_requests(row.in_flight)} in flight on it. Streams that can be continued go on at "
            "another engine of the model, or after the restart; all other requests end with an "
            "error."
        )
    else:
        effect = f"{_requests(row.in_flight)} in flight on it: all end with an error."
    return [
        Action(
            "Restart",
            f"/admin/engines/{quote(row.name)}/restart",
            f"Restart engine {row.name}?",
            f"The engine is stopped, then loads the model again. {effect}",
            f"Engine {row.name} restarts.",
            danger=True,
        )
    ]


def _load_actions(row: ModelRow, abilities: ModelAbilities) -> Iterator[Action]:
    if row.ready == row.engines or row.loading is not None:
        return
    if abilities.asleep:
        yield Action(
            "Wake",
            _path(row, "wake"),
            f"Wake {row.name}?",
            "Its sleeping engines wake up, and the others start. Requests in flight are not "
            "affected.",
            f"{row.name} wakes up.",
        )
        return
    yield Action(
        "Load",
        _path(row, "load"),
        f"Load {row.name}?",
        "Its engines that are not ready start, also those that failed. Requests in flight are not "
        "affected; models on demand that have none may be unloaded to make room.",
        f"{row.name} loads.",
    )


def _sleep_actions(row: ModelRow, abilities: ModelAbilities) -> Iterator[Action]:
    if abilities.sleep_level is None or row.ready == 0:
        return
    weights = "are kept in CPU memory" if abilities.sleep_level == 1 else "are dropped"
    yield Action(
        "Sleep",
        f"{_path(row, 'sleep')}?level={abilities.sleep_level}",
        f"Put {row.name} to sleep?",
        f"GPU memory is given back; the weights {weights}. {_finishing(row, abilities)} A new "
        "request for the model wakes it.",
        f"{row.name} goes to sleep.",
    )


def _unload_actions(row: ModelRow, abilities: ModelAbilities) -> Iterator[Action]:
    if not abilities.unloadable or row.state is EngineState.STOPPED:
        return
    yield Action(
        "Unload",
        _path(row, "unload"),
        f"Unload {row.name}?",
        f"Its engines stop and give their memory back. {_finishing(row, abilities)} "
        f"{_AFTER_UNLOAD[row.load]}",
        f"{row.name} unloads.",
        danger=True,
    )


def _finishing(row: ModelRow, abilities: ModelAbilities) -> str:
    """Return what happens to the requests of engines that leave once they are idle."""
    if row.in_flight == 0:
        return "No request is in flight."
    if abilities.others_stay:
        return (
            f"{_requests(row.in_flight)} in flight: streams go on at the engines that stay, where "
            "they can; the others finish first."
        )
    return f"{_requests(row.in_flight)} in flight: the engines wait until they have finished."


def _requests(number: int) -> str:
    return "1 request is" if number == 1 else f"{number:,} requests are"


def _path(row: ModelRow, verb: str) -> str:
    return f"/admin/models/{quote(row.name)}/{verb}"
