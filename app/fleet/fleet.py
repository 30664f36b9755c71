"""The fleet: the one owner of the models that run and of their engines.

A reload changes models, scaling changes the number of their engines, and discovered servers join
and leave; each of them does so through the fleet. `publish` then gives the catalogue, from which
requests choose, and the on-demand loader the present models. All steps are synchronous up to the
next `await`, so that what is published is always complete.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from app.admission import Admission
from app.fleet.builder import Builder
from app.fleet.deployment import DeployedEngine, ModelDeployment, adapter_sources
from app.fleet.detached import DetachedEngines
from app.fleet.engine_plan import EngineConfig, plan_engines
from app.fleet.moves import can_move_within, is_refusing, moving_streams
from app.fleet.starting import NotStarted, start_all
from app.residency import OnDemandLoader
from app.routing import Catalogue
from app.settings import InForce, ModelSettings
from engines.adapters import AdapterPhase, AdapterSources
from engines.background_tasks import BackgroundTasks
from engines.base import Engine, EngineState
from engines.spec import RemoteSpec

log = logging.getLogger(__name__)

# Seconds that a reload waits for engines to load adapters; a load that takes longer goes on.
ADAPTERS_S = 60.0


@dataclass(frozen=True, slots=True)
class ComingChange:
    """What a change of a model is about to discover, and the engines that it is about to stop."""

    discovering: tuple[RemoteSpec, ...]
    # By name.
    outgoing: frozenset[str]


class Fleet:
    """Owns the deployments of all models, in the order of the configuration."""

    def __init__(
        self,
        in_force: InForce,
        deployments: Sequence[ModelDeployment],
        builder: Builder,
        *,
        catalogue: Catalogue,
        loader: OnDemandLoader,
        admission: Admission,
        detached: DetachedEngines,
    ) -> None:
        self.in_force = in_force
        self.builder = builder
        self.loader = loader
        self.detached = detached
        # Held by what changes the engines of models: a reload, or a step of scaling.
        self.turn = asyncio.Lock()
        self._catalogue = catalogue
        self._admission = admission
        self._deployments = {one.name: one for one in deployments}
        self._coming: Mapping[ModelDeployment, ComingChange] = {}
        self._followers: list[Callable[[], None]] = []
        self._tasks = BackgroundTasks(log)

    @property
    def deployments(self) -> Mapping[str, ModelDeployment]:
        """The present models with their engines, by name."""
        return self._deployments

    @property
    def drain_s(self) -> float:
        """Time that requests have to finish on an engine that leaves."""
        return self.in_force.settings.server.drain_timeout_s

    def is_current(self, deployment: ModelDeployment) -> bool:
        """Return whether a deployment is the present one of its model."""
        return self._deployments.get(deployment.name) is deployment

    def follow(self, publish: Callable[[], None]) -> None:
        """Call `publish` whenever the models have been published."""
        self._followers.append(publish)

    def publish(self) -> None:
        """Give the catalogue, the on-demand loader and the followers the present models."""
        deployments = self._deployments.values()
        for deployment in deployments:
            deployment.want_adapters()
        self._catalogue.replace(
            [
                model
                for one in deployments
                for model in one.models(discovered=bool(self.discovering(one)))
            ]
        )
        on_demand = (one.on_demand() for one in deployments)
        self.loader.replace([model for model in on_demand if model is not None])
        for follower in self._followers:
            follower()

    async def close(self) -> None:
        """Stop the engines that belong to no model."""
        await self._tasks.cancel()
        await self.detached.close()

    # Models

    async def add(self, model: ModelSettings, configs: Sequence[EngineConfig]) -> ModelDeployment:
        """Add a model, and start its engines unless it is loaded on demand.

        Raises NotStarted; then it has been removed again.
        """
        deployment = self.insert(model, configs)
        if model.load == "eager":
            try:
                await start_all(deployment.engines)
            except NotStarted:
                self.withdraw([model.name])
                self.publish()
                await self.retire(deployment)
                raise
        return deployment

    def insert(self, model: ModelSettings, configs: Sequence[EngineConfig]) -> ModelDeployment:
        """Add a model whose engines are not started."""
        deployment = ModelDeployment(model, self.build(model.name, configs))
        self.configure(deployment, model)
        self._deployments[model.name] = deployment
        self.publish()
        return deployment

    def configure(self, deployment: ModelDeployment, model: ModelSettings) -> None:
        """Give a model new settings, which do not change its engines; `publish` follows."""
        before, after = adapter_sources(deployment.settings), adapter_sources(model)
        gone = {name: source for name, source in before.items() if name not in after}
        deployment.settings = model
        self._admission.open(model.name, model.queue)
        if gone:
            deployment.leaving_adapters = {**deployment.leaving_adapters, **gone}
            self._tasks.start(self._unload_adapters(deployment, gone), f"adapters of {model.name}")

    def announce_adapters(self, deployment: ModelDeployment, model: ModelSettings) -> None:
        """Have a model's engines, and those that are added, load the adapters of new settings."""
        deployment.coming_adapters = adapter_sources(model)
        deployment.want_adapters()

    def forget_adapters(self, deployment: ModelDeployment) -> None:
        """Have a model's engines unload what was announced for settings that do not apply."""
        deployment.coming_adapters = {}
        deployment.want_adapters()

    async def load_adapters(self, deployment: ModelDeployment, model: ModelSettings) -> list[str]:
        """Have a model's READY engines load the adapters of new settings, before they are listed.

        Returns why engines have not loaded some; those get no requests for them.
        """
        self.announce_adapters(deployment, model)
        wanted = deployment.coming_adapters
        engines = [one.engine for one in deployment.all_engines]

        def is_pending(engine: Engine, name: str, source: str | None) -> bool:
            state = engine.adapters.get(name)
            if engine.state is not EngineState.READY:
                return False
            if state is None or (state.source or source) != source:
                return True
            return state.phase is AdapterPhase.LOADING

        def settled() -> bool:
            return not any(is_pending(engine, *one) for one in wanted.items() for engine in engines)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ADAPTERS_S):
                await self._catalogue.changes.wait_for(settled)
        deployment.coming_adapters = {}
        return [
            f"{engine.name} has not loaded adapter {name}: "
            f"{(state and state.reason) or 'it takes longer'}"
            for engine in engines
            if engine.state is EngineState.READY
            for name, source in wanted.items()
            if not engine.has_adapter(name, source)
            for state in (engine.adapters.get(name),)
        ]

    async def _unload_adapters(self, deployment: ModelDeployment, gone: AdapterSources) -> None:
        """Let go of adapters that were removed, once requests for them have had time to end."""
        await asyncio.sleep(self.drain_s)
        left = deployment.leaving_adapters.items()
        deployment.leaving_adapters = {n: source for n, source in left if n not in gone}
        deployment.want_adapters()

    def withdraw(self, names: Collection[str]) -> list[ModelDeployment]:
        """Take models out and return them; `publish` follows, and `retire` for each."""
        removed = [self._deployments.pop(name) for name in names]
        for deployment in removed:
            self.detached.add(one.engine for one in deployment.all_engines)
        return removed

    async def retire(self, deployment: ModelDeployment) -> None:
        """Drain and stop a model that has left the catalogue."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.drain_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._admission.wait_until_idle(deployment.name)
        left_s = max(0.0, deadline - clock())
        engines = (one.engine for one in deployment.all_engines)
        await asyncio.gather(*(self.detached.retire(engine, left_s) for engine in engines))
        self._admission.close(deployment.name)

    def reorder(self, names: Sequence[str]) -> None:
        """Bring the models into this order, all others last, and publish them."""
        place = {name: number for number, name in enumerate(names)}
        ordered = sorted(self._deployments.items(), key=lambda one: place.get(one[0], len(place)))
        self._deployments = dict(ordered)
        self.publish()

    @contextmanager
    def announced(self, coming: Mapping[ModelDeployment, ComingChange]) -> Iterator[None]:
        """Discover the servers of changed models before the body stops what they replace."""
        self._coming = coming
        try:
            yield
        finally:
            self._coming = {}

    def discovering(self, deployment: ModelDeployment) -> tuple[RemoteSpec, ...]:
        """Return the specifications by which a model's servers are discovered now, each once."""
        coming = self._coming.get(deployment)
        ahead = () if coming is None else coming.discovering
        return tuple(dict.fromkeys((*deployment.settings.discovering, *ahead)))

    def is_outgoing(self, deployment: ModelDeployment, name: str) -> bool:
        """Return whether an engine of a model is about to be stopped or replaced."""
        coming = self._coming.get(deployment)
        return coming is not None and name in coming.outgoing

    @contextmanager
    def held(self, deployment: ModelDeployment) -> Iterator[None]:
        """Have requests for a model wait, and nothing load it, until its engines are replaced."""
        deployment.held = True
        self.publish()
        try:
            yield
        finally:
            deployment.held = False
            self.publish()

    # Engines of a model

    def build(self, model: str, configs: Sequence[EngineConfig]) -> list[DeployedEngine]:
        """Return engines that are not started."""
        return [DeployedEngine(config, self.builder(model, config)) for config in configs]

    def add_engines(
        self, deployment: ModelDeployment, configs: Sequence[EngineConfig]
    ) -> list[DeployedEngine]:
        """Add engines to a model and return them; they are not started."""
        added = self.build(deployment.name, configs)
        deployment.engines += added
        self.publish()
        return added

    async def remove_engine(self, deployment: ModelDeployment, name: str) -> None:
        """Drain and stop an engine of a model; its streams move."""
        deployed = deployment.get(name)
        replica = deployed.replica

        def can_move() -> bool:
            return is_refusing(replica) and can_move_within(deployment, deployed)

        async with moving_streams(replica, can_move, "it is removed"):
            await self.detached.retire(deployed.engine, self.drain_s)
        deployment.engines.remove(deployed)
        self.publish()

    async def retire_replaced(
        self, deployment: ModelDeployment, old: DeployedEngine, why: str
    ) -> None:
        """Drain and stop an engine that has left the catalogue; `why` is for the log."""
        await self.detached.retire_replaced(deployment, old, self.drain_s, why)

    async def resize(self, model: str, scaled: int) -> tuple[Engine, ...]:
        """Have so many scaled engines of a model, within its bounds; return those to start.

        It waits for a reload that is under way; a model that is gone by then has none to start.
        Those that are not READY go first. Engines that go have drained when this returns.
        """
        async with self.turn:
            deployment = self._deployments.get(model)
            if deployment is None or deployment.settings.scaling is None:
                return ()
            ready_first = sorted(
                deployment.engines, key=lambda one: one.engine.state is not EngineState.READY
            )
            others = {
                each.config.name
                for one in self._deployments.values()
                for each in (one.members if one is deployment else one.all_engines)
            }
            configs = [one.config for one in ready_first]
            plan = plan_engines(configs, deployment.settings, others, scaled)
            added = self.add_engines(deployment, plan.added)
            for config in plan.removed:
                await self.remove_engine(deployment, config.name)
            return tuple(one.engine for one in added)
