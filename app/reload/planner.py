"""Plans a reload: checks that it can work, and chooses how each engine is replaced.

Everything here only reads the fleet. Most of it blocks, on files, the GPU driver and vLLM's parser.
"""

import contextlib
import logging
import threading

from app.errors import InvalidConfiguration
from app.fleet import EnginesByModel, Fleet, Placed, free_resources, run_preflight, take_snapshots
from app.reload.choice import EngineLayout, choose_takeovers
from app.reload.difference import Difference
from app.settings import ConfigError
from engines.process import LauncherMissing

log = logging.getLogger(__name__)

CROWDED = "no memory for both, with what the configuration adds"


class ReloadPlanner:
    """Plans changes of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._builder = fleet.builder

    def plan(self, found: Difference, closed: threading.Event) -> tuple[Difference, Placed]:
        """Return the difference with its takeovers, and the GPUs of the engines. Blocks.

        Raises InvalidConfiguration for engines that evidently cannot start. `closed` ends the wait
        for vLLM's parser.
        """
        preflighted = run_preflight(
            found.new,
            [config for _, config in found.starts()],
            self._builder,
            closed,
            with_adapters={
                *(change.new.name for change in found.changed),
                *(addition.model.name for addition in found.added),
            },
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
        configs = [(one.settings, one.configs) for one in self._fleet.deployments.values()]
        layout = EngineLayout.of(configs, self._builder.placements(configs))
        machine = free_resources(self._fleet, found.new.server.memory_budget_gib)
        snapshots = take_snapshots(self._fleet)
        chosen, alongside = choose_takeovers(found, layout, machine, snapshots)
        with contextlib.suppress(ConfigError):
            placed = self._builder.place(self._engines_after(chosen), alongside)
            by_name = {config.name: placement for config, placement in placed}
            if all(by_name[name] == placement for name, placement in alongside.items()):
                return chosen, placed
        # Each pair fits, but not together with what is added.
        chosen, _ = choose_takeovers(found, layout, machine, snapshots, obstacle=CROWDED)
        return chosen, self._builder.place(self._engines_after(chosen))

    def _engines_after(self, found: Difference) -> EnginesByModel:
        """Return the engines of every model once all is applied."""
        after = {
            name: (one.settings, one.configs)
            for name, one in self._fleet.deployments.items()
            if name not in found.removed
        }
        after |= {c.new.name: (c.new, c.plan.after) for c in found.changed if c.needs_engines}
        after |= {a.model.name: (a.model, a.configs) for a in found.added if not a.needs_restart}
        return list(after.values())
