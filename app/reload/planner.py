"""Plans a reload: checks that it can work, and chooses how each engine is replaced.

Everything here only reads the fleet. Most of it blocks, on files, the GPU driver and vLLM's parser.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence

from app.errors import InvalidConfiguration
from app.fleet import Builder, EngineConfig, ModelDeployment, run_preflight
from app.fleet.builder import EnginesByModel, Placed
from app.fleet.deployment import DeployedEngine, memory_gib
from app.fleet.fleet import IDLE_STATES, Fleet
from app.fleet.takeover import EngineSnapshot, MachineResources, OverlapCheck, check_overlap
from app.reload.choice import EngineLayout, choose_takeovers
from app.reload.difference import Difference
from app.settings import ConfigError
from engines.base import EngineState
from engines.gpu import AcceleratorError, Device, available_host_gib
from engines.process import LauncherMissing, vllm_runs_on_cpu

log = logging.getLogger(__name__)

CROWDED = "no memory for both, with what the configuration adds"


class ReloadPlanner:
    """Plans changes of the engines in `deployments`, which it shares with its owner."""

    def __init__(
        self, deployments: Mapping[str, ModelDeployment], builder: Builder, fleet: Fleet
    ) -> None:
        self._deployments = deployments
        self._builder = builder
        self._fleet = fleet

    def plan(self, found: Difference, closed: threading.Event) -> tuple[Difference, Placed]:
        """Return the difference with its takeovers, and the GPUs of the engines. Blocks.

        Raises InvalidConfiguration for engines that evidently cannot start. `closed` ends the wait
        for vLLM's parser.
        """
        preflighted = run_preflight(
            found.new, [config for _, config in found.starts()], self._builder, closed
        )
        faults = list(preflighted.faults)
        for note in preflighted.notes:
            log.warning("reload: %s", note)
        try:
            for model, config in found.starts():
                self._fleet.build(model, (config,))
        except LauncherMissing as error:
            faults.append(str(error))
        placed: Placed = ()
        try:
            found, placed = self._choose_takeovers(found)
        except ConfigError as error:
            faults += error.faults
        if faults:
            raise InvalidConfiguration("\n".join(dict.fromkeys(faults)))
        return found, placed

    def _choose_takeovers(self, found: Difference) -> tuple[Difference, Placed]:
        """Return the difference with its takeovers, and all GPUs. Raises ConfigError."""
        configs = [(one.settings, one.configs) for one in self._deployments.values()]
        layout = EngineLayout.of(configs, self._builder.placements(configs))
        machine = self._resources(found.new.server.memory_budget_gib)
        snapshots = {one.config.name: _snapshot(one) for one in self._engines()}
        chosen, alongside = choose_takeovers(found, layout, machine, snapshots)
        with contextlib.suppress(ConfigError):
            placed = self._builder.place(self._engines_after(chosen), alongside)
            by_name = {config.name: placement for config, placement in placed}
            if all(by_name[name] == placement for name, placement in alongside.items()):
                return chosen, placed
        # Each pair fits, but not together with what is added.
        chosen, _ = choose_takeovers(found, layout, machine, snapshots, obstacle=CROWDED)
        return chosen, self._builder.place(self._engines_after(chosen))

    async def check_overlap(
        self, old: DeployedEngine, new: EngineConfig, budget_gib: float | None
    ) -> OverlapCheck:
        """Return whether an engine can start alongside another, as of now."""
        machine = await asyncio.to_thread(self._resources, budget_gib)
        return check_overlap(old.config, new, _snapshot(old), machine)

    def _engines(self) -> Iterator[DeployedEngine]:
        return (engine for one in self._deployments.values() for engine in one.engines)

    def _resources(self, budget_gib: float | None) -> MachineResources:
        """Return the resources that are free now. Blocks."""
        try:
            devices: Sequence[Device] | None = self._builder.devices()
        except AcceleratorError:
            devices = None
        if budget_gib is not None:
            budget_gib -= self._budgeted_gib()
        free_gib = available_host_gib()
        if free_gib is not None:
            # How much of it starting engines have taken already is unknown.
            starting = (
                memory_gib(one.engine)
                for one in self._engines()
                if one.engine.state is EngineState.STARTING
            )
            free_gib = max(free_gib - sum(starting), 0.0)
        return MachineResources(devices, vllm_runs_on_cpu(), free_gib, budget_gib)

    def _budgeted_gib(self) -> float:
        """Return the part of server.memory_budget_gib that is not available to a new engine.

        That is what is loaded, and at least the eager models plus the largest on-demand model:
        otherwise that one could not be loaded until the old engine has stopped.
        """
        eager = loaded = largest = 0.0
        for one in self._deployments.values():
            running = (e.engine for e in one.engines if e.engine.state not in IDLE_STATES)
            taken = sum(map(memory_gib, running))
            if one.settings.load == "eager":
                eager += taken
            else:
                loaded += taken
                largest = max(largest, sum(memory_gib(each.engine) for each in one.engines))
        return eager + max(loaded, largest) + self._fleet.uncounted_gib

    def _engines_after(self, found: Difference) -> EnginesByModel:
        """Return the engines of every model once all is applied."""
        after = {
            name: (one.settings, one.configs)
            for name, one in self._deployments.items()
            if name not in found.removed
        }
        after |= {c.new.name: (c.new, c.plan.after) for c in found.changed if c.needs_engines}
        after |= {a.model.name: (a.model, a.configs) for a in found.added if not a.needs_restart}
        return list(after.values())


def _snapshot(deployed: DeployedEngine) -> EngineSnapshot:
    """Return the state of an engine. Blocks."""
    engine = deployed.engine
    ready = engine.state is EngineState.READY
    return EngineSnapshot(ready, engine.memory_gib, engine.last_start_s())
