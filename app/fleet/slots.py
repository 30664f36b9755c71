"""Which engine runs what under which name, and how that gets from one configuration to another.

Pure. The name of an engine is that of its directory, so an engine that need not be touched keeps
its name for as long as it runs, whatever comes and goes around it.
"""

import hashlib
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from app.settings import ModelSettings, Settings
from engines.spec import EngineSpec, LocalSpec, ProcessSpec


@dataclass(frozen=True, slots=True)
class Slot:
    """One engine's name, and what shall run under it; `spec.replicas` means nothing here."""

    name: str
    spec: EngineSpec
    # What the engine may fetch media from; () for a remote one, whose server decides.
    media_domains: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model's engines change. `after` has them all, in the order of the configuration."""

    after: tuple[Slot, ...]
    # What runs on as it is.
    kept: tuple[Slot, ...] = ()
    # What makes way, and what comes in its place: under the same name, unless both are to run for a
    # while (`with_names`).
    replaced: tuple[tuple[Slot, Slot], ...] = ()
    removed: tuple[Slot, ...] = ()
    added: tuple[Slot, ...] = ()

    def __bool__(self) -> bool:
        """Whether any engine is touched."""
        return bool(self.replaced or self.removed or self.added)


def initial_slots(
    settings: Settings, running: Mapping[str, str] | None = None
) -> dict[str, tuple[Slot, ...]]:
    """Return the engines that a gateway starts with, by model; no two have the same name.

    `running` has the mark of each engine that an earlier gateway has left, by name. One that runs
    what is wanted keeps its name, by which it is found.
    """
    left = dict(running or {})
    taken_over: dict[tuple[str, int], str] = {}
    for model in settings.models:
        for place, spec in enumerate(_each(model)):
            wanted = mark(model.name, _slot("", spec, model))
            name = next((name for name, runs in left.items() if runs == wanted), None)
            if name is not None:
                del left[name]
                taken_over[model.name, place] = name
    slots: dict[str, tuple[Slot, ...]] = {}
    taken = set(taken_over.values())
    for model in settings.models:
        specs = _each(model)
        found = [taken_over.get((model.name, place)) for place in range(len(specs))]
        fresh = iter(free_names(model.name, found.count(None), taken))
        slots[model.name] = tuple(
            _slot(name or next(fresh), spec, model) for name, spec in zip(found, specs, strict=True)
        )
        taken |= {slot.name for slot in slots[model.name]}
    return slots


def slots_of(model: ModelSettings, taken: Container[str] = ()) -> tuple[Slot, ...]:
    """Return the engines that a model begins with, under names that are not taken."""
    specs = _each(model)
    names = free_names(model.name, len(specs), taken)
    return tuple(_slot(name, spec, model) for name, spec in zip(names, specs, strict=True))


def plan(slots: Sequence[Slot], model: ModelSettings, taken: Container[str] = ()) -> Plan:
    """Return how the engines that a model has become those that its new settings want.

    Engines that run the same are kept, of the others as many as possible are replaced in order.
    `taken` has the names of all other engines.
    """
    wanted = [_slot("", spec, model) for spec in _each(model)]
    left = list(slots)
    kept: list[tuple[Slot, int]] = []
    open_places: list[int] = []
    for place, one in enumerate(wanted):
        same = next((slot for slot in left if identity(slot) == identity(one)), None)
        if same is None:
            open_places.append(place)
        else:
            left.remove(same)
            kept.append((same, place))
    replaced = [(old, place) for old, place in zip(left, open_places, strict=False)]
    after = {place: slot for slot, place in kept}
    after |= {place: replace(wanted[place], name=old.name) for old, place in replaced}
    fresh = open_places[len(replaced) :]
    in_use = {slot.name for slot in slots}
    names = free_names(model.name, len(fresh), _Either(in_use, taken))
    added = {
        place: replace(wanted[place], name=name) for place, name in zip(fresh, names, strict=True)
    }
    after |= added
    return Plan(
        tuple(after[place] for place in range(len(wanted))),
        tuple(slot for slot, _ in kept),
        tuple((old, after[place]) for old, place in replaced),
        tuple(left[len(replaced) :]),
        tuple(added.values()),
    )


def with_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return a plan in which what replaces an engine of `names` has the name that stands there."""
    replaced = tuple(
        (old, replace(new, name=names.get(old.name, new.name))) for old, new in plan.replaced
    )
    renamed = {old.name: new for old, new in replaced}
    return replace(
        plan,
        # An engine that is replaced and its successor have had one name until now.
        after=tuple(renamed.get(slot.name, slot) for slot in plan.after),
        replaced=replaced,
    )


def mark(model: str, slot: Slot) -> str:
    """Return what an engine of a model runs, as a text that says nothing else."""
    return hashlib.sha256(f"{model}\n{identity(slot)}".encode()).hexdigest()


def identity(slot: Slot) -> str:
    """Return a text that is the same for engines that run the same; it may hold secrets.

    As JSON, since 1, 1.0 and true are equal in Python and three different flags for vLLM.
    """
    return json.dumps(made_of(slot), sort_keys=True)


def made_of(slot: Slot) -> dict[str, object]:
    """Return everything that an engine is made of, as JSON has it."""
    spec = slot.spec.model_dump(mode="json", exclude={"replicas"})
    return {**spec, "media": {"domains": list(slot.media_domains)}}


def free_names(model: str, number: int, taken: Container[str]) -> list[str]:
    """Return names for engines of a model that are not taken."""
    names: Iterable[str] = (f"{_slug(model)}-{n}" for n in count())
    free = (name for name in names if name not in taken)
    return [next(free) for _ in range(number)]


@dataclass(frozen=True, slots=True)
class _Either:
    """What is in one of two collections."""

    one: Container[str]
    other: Container[str]

    def __contains__(self, name: object) -> bool:
        return name in self.one or name in self.other


def _slot(name: str, spec: EngineSpec, model: ModelSettings) -> Slot:
    return Slot(name, spec, model.media.domains if isinstance(spec, LocalSpec) else ())


def _each(model: ModelSettings) -> list[EngineSpec]:
    """Return a spec for each engine."""
    return [
        spec
        for spec in model.engines
        for _ in range(spec.replicas if isinstance(spec, ProcessSpec) else 1)
    ]


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".")[:40]
