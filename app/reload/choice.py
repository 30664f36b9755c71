"""Which engines make way to a successor beside them, as far as all fit together: pure.

Engines are replaced one after the other, so of each pair both must fit beside what else is there at
that moment: the successors of those before it, and the engines that are yet to be replaced.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

from app.fleet.builder import Slots
from app.fleet.slots import Slot, free_names, with_names
from app.reload.difference import Difference, ModelChange
from app.reload.takeover import Machine, Present, Takeover, prospect, room
from app.settings import ModelSettings
from engines.gpu.placement import Placement, PlacementError, PlacementRequest
from engines.spec import LocalSpec

UNLOADED = "all engines of the model are unloaded for the change"


@dataclass(slots=True)
class Seats:
    """Who is there at one moment, models in the order of the configuration."""

    models: dict[str, tuple[ModelSettings, list[Slot]]]
    # The GPUs of engines that were given some, by name.
    placements: dict[str, Placement]
    # Names that no other engine may have.
    taken: set[str]

    @classmethod
    def of(cls, models: Slots, placements: Mapping[str, Placement]) -> Self:
        """Return who is there now."""
        by_name = {model.name: (model, list(slots)) for model, slots in models}
        taken = {slot.name for _, slots in models for slot in slots}
        return cls(by_name, dict(placements), taken)

    def copy(self) -> "Seats":
        """Return the same, which can be changed without changing this."""
        models = {name: (model, list(slots)) for name, (model, slots) in self.models.items()}
        return Seats(models, dict(self.placements), set(self.taken))

    def wishes(self) -> list[PlacementRequest]:
        """Return what every engine of this machine asks for."""
        return [
            wish_of(model, slot)
            for model, slots in self.models.values()
            for slot in slots
            if isinstance(slot.spec, LocalSpec)
        ]

    def replace(self, model: str, old: Slot, new: Slot, placement: Placement | None) -> None:
        """Have another engine in the place of one."""
        slots = self.models[model][1]
        slots[slots.index(old)] = new
        kept = self.placements.pop(old.name, None)
        if (placement := placement or (kept if new.name == old.name else None)) is not None:
            self.placements[new.name] = placement


def wish_of(model: ModelSettings, slot: Slot) -> PlacementRequest:
    """Return what an engine of this machine asks for."""
    assert isinstance(slot.spec, LocalSpec)
    return PlacementRequest(slot.name, model.name, slot.spec, on_demand=model.load == "on_demand")


def choose(
    found: Difference,
    standing: Seats,
    machine: Machine,
    present: Mapping[str, Present],
    *,
    hindrance: str | None = None,
) -> tuple[Difference, dict[str, Placement]]:
    """Return a difference in which each engine makes way in the way that is possible.

    With it come the GPUs of those that start beside another, by name. `standing` is as it is before
    anything is changed. `hindrance` says why none can start beside another, if none can.
    """
    now = standing.copy()
    for name in found.removed:
        del now.models[name]
    now.taken |= {slot.name for change in found.changed for slot in change.plan.after}
    now.taken |= {slot.name for addition in found.added for slot in addition.slots}
    placements: dict[str, Placement] = {}
    changed: list[ModelChange] = []
    for change in found.changed:
        if not change.needs_engines:
            changed.append(change)
            continue
        chooser = _Chooser(change, now.copy(), machine, present, hindrance)
        chosen = chooser.chosen()
        if change.old.load == "on_demand" and not chosen.beside:
            # It is unloaded, all of it, so that nothing loads it while its engines change.
            why = next((one.obstacle for one in chosen.takeovers if one.obstacle), UNLOADED)
            chooser = _Chooser(change, now.copy(), machine, present, why)
            chosen = chooser.chosen()
        changed.append(chosen)
        placements |= chooser.placements
        now = chooser.standing
    return replace(found, changed=tuple(changed)), placements


class _Chooser:
    """Goes through the engines of one model; `standing` is as it is after each step."""

    def __init__(
        self,
        change: ModelChange,
        standing: Seats,
        machine: Machine,
        present: Mapping[str, Present],
        hindrance: str | None,
    ) -> None:
        self._change = change
        self.standing = standing
        self._machine = machine
        self._present = present
        self._hindrance = hindrance
        self.placements: dict[str, Placement] = {}

    def chosen(self) -> ModelChange:
        """Return the change with the way of each engine that serves."""
        plan, standing, model = self._change.plan, self.standing, self._change.new.name
        slots = standing.models[model][1]
        for slot in plan.removed:
            slots.remove(slot)
        serving = {slot.name for slot in slots if self._serves(slot)}
        names: dict[str, str] = {}
        takeovers: list[Takeover] = []
        for old, new in plan.replaced:
            successor, placement = new, None
            if self._serves(old) and isinstance(new.spec, LocalSpec):
                [name] = free_names(model, 1, standing.taken)
                obstacle, placement = self._prospect(old, replace(new, name=name))
                if obstacle is None:
                    successor = replace(new, name=name)
                    names[old.name] = name
                    standing.taken.add(name)
                takeovers.append(self._takeover(old, successor, obstacle, serving))
            standing.replace(model, old, successor, placement)
            serving = serving - {old.name} | {successor.name}
        slots += plan.added
        return replace(self._change, plan=with_names(plan, names), takeovers=tuple(takeovers))

    def _serves(self, slot: Slot) -> bool:
        here = self._present.get(slot.name)
        return here is not None and here.serves

    def _prospect(self, old: Slot, new: Slot) -> tuple[str | None, Placement | None]:
        """Return why an engine cannot start beside another, else its GPUs where it gets some."""
        if self._hindrance is not None:
            return self._hindrance, None
        there = prospect(old, new, self._present[old.name], self._machine)
        if there.obstacle is not None:
            return there.obstacle, None
        standing, wish = self.standing, wish_of(self._change.new, new)
        try:
            placement = room(wish, standing.wishes(), self._machine, standing.placements)
        except PlacementError as error:
            return str(error), None
        if placement is not None:
            self.placements[new.name] = placement
        return None, placement

    def _takeover(
        self, old: Slot, new: Slot, obstacle: str | None, serving: Collection[str]
    ) -> Takeover:
        held = self._change.old.load == "on_demand"
        covered = not held and any(name != old.name for name in serving)
        start_s = self._present[old.name].start_s
        return Takeover(old.name, new.name, obstacle, covered, held, start_s)
