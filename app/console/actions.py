"""The actions on models and engines: which are possible now, and what each does to requests.

A confirmation says how many requests are in flight, and whether they finish, move or end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from app.console.language import gettext, ngettext, noop
from app.fleet import EngineRow, ModelRow
from engines.base import EngineState

_AFTER_UNLOAD = {
    "on_demand": noop("A new request for the model loads it again."),
    "eager": noop("Requests for it are refused, or go to its fallbacks, until it is loaded again."),
}


@dataclass(frozen=True, slots=True)
class Action:
    """A button: a POST to the admin API after a confirmation."""

    name: str
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
    requests = _requests(row.in_flight)
    if row.in_flight == 0:
        effect = gettext("No request is in flight on it.")
    elif continues:
        effect = gettext(
            "%(requests)s in flight on it. Streams that can be continued go on at another engine "
            "of the model, or after the restart; all other requests end with an error.",
            requests=requests,
        )
    else:
        effect = gettext("%(requests)s in flight on it: all end with an error.", requests=requests)
    return [
        Action(
            "restart",
            gettext("Restart"),
            f"/admin/engines/{quote(row.name)}/restart",
            gettext("Restart engine %(name)s?", name=row.name),
            gettext("The engine is stopped, then loads the model again. %(effect)s", effect=effect),
            gettext("Engine %(name)s restarts.", name=row.name),
            danger=True,
        )
    ]


def _load_actions(row: ModelRow, abilities: ModelAbilities) -> Iterator[Action]:
    if row.ready == row.engines or row.loading is not None:
        return
    if abilities.asleep:
        yield Action(
            "wake",
            gettext("Wake"),
            _path(row, "wake"),
            gettext("Wake %(name)s?", name=row.name),
            gettext(
                "Its sleeping engines wake up, and the others start. Requests in flight are not "
                "affected."
            ),
            gettext("%(name)s wakes up.", name=row.name),
        )
        return
    yield Action(
        "load",
        gettext("Load"),
        _path(row, "load"),
        gettext("Load %(name)s?", name=row.name),
        gettext(
            "Its engines that are not ready start, also those that failed. Requests in flight are "
            "not affected; models on demand that have none may be unloaded to make room."
        ),
        gettext("%(name)s loads.", name=row.name),
    )


def _sleep_actions(row: ModelRow, abilities: ModelAbilities) -> Iterator[Action]:
    if abilities.sleep_level is None or row.ready == 0:
        return
    if abilities.sleep_level == 1:
        memory = gettext("GPU memory is given back; the weights are kept in CPU memory.")
    else:
        memory = gettext("GPU memory is given back; the weights are dropped.")
    yield Action(
        "sleep",
        gettext("Sleep"),
        f"{_path(row, 'sleep')}?level={abilities.sleep_level}",
        gettext("Put %(name)s to sleep?", name=row.name),
        gettext(
            "%(memory)s %(requests)s A new request for the model wakes it.",
            memory=memory,
            requests=_finishing(row, abilities),
        ),
        gettext("%(name)s goes to sleep.", name=row.name),
    )


def _unload_actions(row: ModelRow, abilities: ModelAbilities) -> Iterator[Action]:
    if not abilities.unloadable or row.state is EngineState.STOPPED:
        return
    yield Action(
        "unload",
        gettext("Unload"),
        _path(row, "unload"),
        gettext("Unload %(name)s?", name=row.name),
        gettext(
            "Its engines stop and give their memory back. %(requests)s %(after)s",
            requests=_finishing(row, abilities),
            after=gettext(_AFTER_UNLOAD[row.load]),
        ),
        gettext("%(name)s unloads.", name=row.name),
        danger=True,
    )


def _finishing(row: ModelRow, abilities: ModelAbilities) -> str:
    """Return what happens to the requests of engines that leave once they are idle."""
    if row.in_flight == 0:
        return gettext("No request is in flight.")
    requests = _requests(row.in_flight)
    if abilities.others_stay:
        return gettext(
            "%(requests)s in flight: streams go on at the engines that stay, where they can; the "
            "others finish first.",
            requests=requests,
        )
    return gettext(
        "%(requests)s in flight: the engines wait until they have finished.", requests=requests
    )


def _requests(number: int) -> str:
    return ngettext("1 request is", "%(number)s requests are", number, number=format(number, ","))


def _path(row: ModelRow, verb: str) -> str:
    return f"/admin/models/{quote(row.name)}/{verb}"
