"""Chooses for each engine to be replaced whether its successor starts alongside it. Pure.

Engines are replaced one after the other. So each pair must fit alongside the engines that run at
that moment: earlier successors, and engines that are yet to be replaced.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

from app.fleet import (
    EngineConfig,
    EnginesByModel,
    EngineSnapshot,
    MachineResources,
    check_overlap,
    free_names,
    place_alongside,
    rename_successors,
)
from app.reload.difference import Difference, ModelChange, Takeover
from app.settings import ModelSettings
from engines.gpu import Placement, PlacementError, PlacementRequest
from engines.spec import LocalSpec, ManagedSpec

UNLOADED = "all engines of the model are unloaded for the change"


@dataclass(slots=True)
class EngineLayout:
    """The engines at one moment, models in the order of the configuration."""

    models: dict[str, tuple[ModelSettings, list[EngineConfig]]]
    # GPUs of the engines that were given some, by name.
    placements: dict[str, Placement]
    # Names that no other engine may have.
    taken: set[str]

    @classmethod
    def of(cls, models: EnginesByModel, placements: Mapping[str, Placement]) -> Self:
        """Return the present layout."""
        by_name = {model.name: (model, list(configs)) for model, configs in models}
        taken = {config.name for _, configs in models for config in configs}
        return cls(by_name, dict(placements), taken)

    def copy(self) -> "EngineLayout":
        """Return an independent copy."""
        models = {name: (model, list(configs)) for name, (model, configs) in self.models.items()}
        return EngineLayout(models, dict(self.placements), set(self.taken))

    def placement_requests(self) -> list[PlacementRequest]:
        """Return the placement request of every local engine."""
        return [
            placement_request(model, config)
            for model, configs in self.models.values()
            for config in configs
            if isinstance(config.spec, LocalSpec)
        ]

    def replace(
        self, model: str, old: EngineConfig, new: EngineConfig, placement: Placement | None
    ) -> None:
        """Replace an engine; one with the same name keeps its GPUs unless it is given others."""
        configs = self.models[model][1]
        configs[configs.index(old)] = new
        kept = self.placements.pop(old.name, None)
        if (placement := placement or (kept if new.name == old.name else None)) is not None:
            self.placements[new.name] = placement


def placement_request(model: ModelSettings, config: EngineConfig) -> PlacementRequest:
    """Return the placement request of a local engine."""
    assert isinstance(config.spec, LocalSpec)
    return PlacementRequest(
        config.name, model.name, config.spec, on_demand=model.load == "on_demand"
    )


def choose_takeovers(
    found: Difference,
    layout: EngineLayout,
    machine: MachineResources,
    snapshots: Mapping[str, EngineSnapshot],
    *,
    obstacle: str | None = None,
) -> tuple[Difference, dict[str, Placement]]:
    """Return the difference with the takeovers of each model, and the GPUs of their successors.

    `layout` is that before the change, `snapshots` has its engines by name. With an `obstacle` no
    engine starts alongside another, for this reason.
    """
    now = layout.copy()
    for name in found.removed:
        del now.models[name]
    now.taken |= {config.name for change in found.changed for config in change.plan.after}
    now.taken |= {config.name for addition in found.added for config in addition.configs}
    placements: dict[str, Placement] = {}
    changed: list[ModelChange] = []
    for change in found.changed:
        if not change.needs_engines:
            changed.append(change)
            continue
        chooser = _Chooser(change, now.copy(), machine, snapshots, obstacle)
        chosen = chooser.chosen()
        if change.old.load == "on_demand" and not chosen.overlaps:
            # All of it is unloaded, so that no request loads it while its engines change.
            why = next((one.obstacle for one in chosen.takeovers if one.obstacle), UNLOADED)
            chooser = _Chooser(change, now.copy(), machine, snapshots, why)
            chosen = chooser.chosen()
        changed.append(chosen)
        placements |= chooser.placements
        now = chooser.layout
    return replace(found, changed=tuple(changed)), placements


class _Chooser:
    """Goes through the engines of one model; `layout` is that after the latest step."""

    def __init__(
        self,
        change: ModelChange,
        layout: EngineLayout,
        machine: MachineResources,
        snapshots: Mapping[str, EngineSnapshot],
        obstacle: str | None,
    ) -> None:
        self._change = change
        self.layout = layout
        self._machine = machine
        self._snapshots = snapshots
        self._obstacle = obstacle
        self.placements: dict[str, Placement] = {}

    def chosen(self) -> ModelChange:
        """Return the change with the takeover of each READY engine."""
        plan, layout, model = self._change.plan, self.layout, self._change.new.name
        configs = layout.models[model][1]
        for config in plan.removed:
            configs.remove(config)
        ready = {config.name for config in configs if self._is_ready(config)}
        names: dict[str, str] = {}
        takeovers: list[Takeover] = []
        for old, new in plan.replaced:
            successor, placement = new, None
            if self._is_ready(old) and isinstance(new.spec, ManagedSpec):
                [name] = free_names(model, 1, layout.taken)
                obstacle, placement = self._check(old, replace(new, name=name))
                if obstacle is None:
                    successor = replace(new, name=name)
                    names[old.name] = name
                    layout.taken.add(name)
                takeovers.append(self._takeover(old, successor, obstacle, ready))
            layout.replace(model, old, successor, placement)
            ready = ready - {old.name} | {successor.name}
        configs += plan.added
        plan = rename_successors(plan, names)
        return replace(self._change, plan=plan, takeovers=tuple(takeovers))

    def _is_ready(self, config: EngineConfig) -> bool:
        snapshot = self._snapshots.get(config.name)
        return snapshot is not None and snapshot.ready

    def _check(self, old: EngineConfig, new: EngineConfig) -> tuple[str | None, Placement | None]:
        """Return why an engine cannot start alongside another, else its GPUs if it gets any."""
        if self._obstacle is not None:
            return self._obstacle, None
        overlap = check_overlap(old, new, self._snapshots[old.name], self._machine)
        if overlap.obstacle is not None:
            return overlap.obstacle, None
        layout, request = self.layout, placement_request(self._change.new, new)
        try:
            placement = place_alongside(
                request, layout.placement_requests(), self._machine, layout.placements
            )
        except PlacementError as error:
            return str(error), None
        if placement is not None:
            self.placements[new.name] = placement
        return None, placement

    def _takeover(
        self, old: EngineConfig, new: EngineConfig, obstacle: str | None, ready: Collection[str]
    ) -> Takeover:
        on_demand = self._change.old.load == "on_demand"
        return Takeover(
            old=old.name,
            new=new.name,
            obstacle=obstacle,
            others_serve=not on_demand and any(name != old.name for name in ready),
            requests_wait=on_demand,
            load_s=self._snapshots[old.name].load_s,
        )
