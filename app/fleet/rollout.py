"""Replaces the engines of a model one at a time, with rollback.

`takeover` decides whether an engine and its successor can run at once; the order of the steps is
described there. `moves` says which streams of an engine go on elsewhere. This carries them out.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from app.fleet.deployment import IDLE_STATES, DeployedEngine, ModelDeployment
from app.fleet.engine_plan import EngineConfig, EnginePlan
from app.fleet.fleet import Fleet
from app.fleet.moves import can_move_within, can_wait_for, is_refusing, moving_streams
from app.fleet.resources import check_overlap_now
from app.fleet.starting import NotStarted, start, start_all
from app.fleet.takeover import OverlapCheck
from engines.base import EngineState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutTerms:
    """Options for carrying out a plan."""

    start: bool  # new engines are started; otherwise they are only built
    wake: bool = False  # kept engines that are idle are started, too
    # What was found for a model as a whole, by the name of the engine that is replaced.
    checks: Mapping[str, OverlapCheck] = field(default_factory=dict)


class Rollout:
    """Carries out one plan for a model."""

    def __init__(self, fleet: Fleet, deployment: ModelDeployment, terms: RolloutTerms) -> None:
        self._fleet = fleet
        self._deployment = deployment
        self._terms = terms
        self._start = terms.start

    async def run(self, plan: EnginePlan) -> None:
        """Carry out a plan; kept engines are not touched.

        A successor with a name of its own starts alongside its predecessor unless there is an
        obstacle by now. Raises NotStarted after a rollback to the engines of before.
        """
        deployment, terms = self._deployment, self._terms
        before = deployment.configs
        # Steps done or begun: the engine of before, and the one of after.
        steps: list[tuple[EngineConfig | None, EngineConfig | None]] = []
        try:
            for config in plan.removed:  # first: new engines may need their memory
                steps.append((config, None))
                await self._fleet.remove_engine(deployment, config.name)
            for old, new in plan.replaced:
                steps.append((old, new))
                await self._replace(old.name, new)
            steps += [(None, config) for config in plan.added]
            idle = [one for one in deployment.engines if one.engine.state in IDLE_STATES]
            added = self._fleet.add_engines(deployment, plan.added)
            if terms.start:
                await start_all([*added, *(idle if terms.wake else ())])
        except NotStarted as error:
            faults = [str(error)]
            self._start = True
            for was, now in reversed(steps):
                faults += await self._roll_back(was, now)
            self._finish(before)
            raise NotStarted("; ".join(faults)) from None
        self._finish(plan.after)

    def _finish(self, configs: tuple[EngineConfig, ...]) -> None:
        """Bring the engines into the order of the configuration."""
        order = {config.name: place for place, config in enumerate(configs)}
        # An engine that could not be rolled back has another name, and comes last.
        self._deployment.engines.sort(key=lambda one: order.get(one.config.name, len(order)))
        self._fleet.publish()

    async def _replace(self, name: str, config: EngineConfig) -> None:
        """Replace the engine with a name by that of a config. Raises NotStarted."""
        old = self._deployment.get(name)
        if config.spec.kind == "remote":
            await self._replace_by_remote(old, config)
            return
        if self._start and config.name != name and old.engine.state is EngineState.READY:
            overlap = self._terms.checks.get(name)
            if overlap is None:
                overlap = await check_overlap_now(self._fleet, old, config)
            if overlap.obstacle is None:
                await self._take_over(old, config, overlap.need_gib or 0.0)
                return
            log.warning(
                "engine %s ends before %s starts: %s",
                name,
                config.name,
                overlap.obstacle,
                extra={"engine": name},
            )
        await self._retire_before(old, config)
        new = self._build(config)
        self._put_in_place_of(old, new)
        self._fleet.publish()
        if self._start:
            await start(new)

    async def _retire_before(self, old: DeployedEngine, config: EngineConfig) -> None:
        """Drain and stop an engine that has to end before its successor starts."""
        deployment, replica = self._deployment, old.replica
        loop, drain_s = asyncio.get_running_loop(), self._fleet.drain_s
        ends_at = loop.time() + drain_s

        def can_move() -> bool:
            return is_refusing(replica) and (
                can_move_within(deployment, old)
                or (self._start and can_wait_for(deployment, old, config, ends_at - loop.time()))
            )

        async with moving_streams(replica, can_move, "it is replaced"):
            await self._fleet.detached.retire(old.engine, drain_s)

    async def _replace_by_remote(self, old: DeployedEngine, config: EngineConfig) -> None:
        """Replace an engine by a remote server once that is READY; it needs no memory here.

        Raises NotStarted.
        """
        new, detached = self._build(config), self._fleet.detached
        detached.add([new.engine])
        try:
            await start(new)
        except NotStarted:
            await detached.retire(new.engine, 0.0)
            raise
        detached.discard(new.engine)
        detached.add([old.engine])
        self._put_in_place_of(old, new)
        self._fleet.publish()
        await self._fleet.retire_replaced(self._deployment, old, "it is replaced")

    async def _take_over(self, old: DeployedEngine, config: EngineConfig, need_gib: float) -> None:
        """Start an engine alongside another, which is retired when the new one is READY.

        Raises NotStarted; then the old one serves as before.
        """
        fleet, deployment, new = self._fleet, self._deployment, self._build(config)
        expected_gib = fleet.detached.expected_gib
        deployment.engines.insert(deployment.engines.index(old) + 1, new)
        deployment.successor = new
        expected_gib[new.engine] = need_gib
        fleet.publish()
        names, extra = (new.engine.name, old.engine.name), {"engine": new.engine.name}
        log.info("engine %s starts alongside %s", *names, extra=extra)
        try:
            await start(new)
        except NotStarted as error:
            del expected_gib[new.engine]
            deployment.engines.remove(new)
            deployment.successor = None
            fleet.publish()
            await fleet.detached.retire(new.engine, 0.0)
            raise NotStarted(f"{error}; {old.engine.name} serves on") from None
        # No task switch from here to `publish`: a READY engine is listed at every moment.
        fleet.detached.add([old.engine])
        deployment.engines.remove(old)
        deployment.successor = None
        fleet.publish()
        log.info("engine %s has taken over from %s", *names, extra=extra)
        await fleet.retire_replaced(deployment, old, "it is replaced")
        del expected_gib[new.engine]
        fleet.publish()  # memory is free, for which a model on demand may wait

    async def _roll_back(self, was: EngineConfig | None, now: EngineConfig | None) -> list[str]:
        """Undo one step; return what failed."""
        deployment = self._deployment
        present = None if now is None else deployment.find(now.name)
        if was is not None and (old := deployment.find(was.name)) is not None and old.config is was:
            return []  # it still serves
        try:
            if was is not None and present is not None:
                await self._replace(present.config.name, was)
            elif was is not None:
                [again] = self._fleet.add_engines(deployment, (was,))
                await start(again)
            elif present is not None:
                await self._fleet.remove_engine(deployment, present.config.name)
        except NotStarted as error:
            return [f"with its old settings, {error}"]
        return []

    def _build(self, config: EngineConfig) -> DeployedEngine:
        [built] = self._fleet.build(self._deployment.name, (config,))
        self._deployment.want_adapters(built.engine)
        return built

    def _put_in_place_of(self, old: DeployedEngine, new: DeployedEngine) -> None:
        engines = self._deployment.engines
        engines[engines.index(old)] = new
