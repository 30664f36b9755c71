"""Applies a planned difference to the running gateway; a model changes completely or not at all.

Models are removed, then changed one after the other, then added. A model whose new engine fails to
start is rolled back to its old engines and settings; the others are not affected.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.auth import Authenticator
from app.discovery import FindSource
from app.errors import GatewayError
from app.fleet import Builder, DiscoveredServers, EngineConfig, ModelDeployment
from app.fleet.deployment import DeployedEngine
from app.fleet.engine_plan import EnginePlan, plan_engines
from app.fleet.fleet import IDLE_STATES, ChangeTerms, CheckOverlap, Fleet, NotStarted
from app.fleet.takeover import OverlapCheck
from app.relay import RelayBounds, RelayServices, memory_bounds
from app.reload.difference import Addition, Difference, ModelChange, applied
from app.reload.planner import ReloadPlanner
from app.reload.report import ModelReport, Outcome
from app.settings import ModelSettings, Settings
from app.telemetry.logs import Levels
from app.usage import Ledger
from engines.base import Engine, EngineState


@dataclass(frozen=True, slots=True)
class Adjustable:
    """The parts of the gateway that take new settings while they run."""

    services: RelayServices
    authenticator: Authenticator
    ledger: Ledger
    levels: Levels


class Applier:
    """Owns the settings in force and the engines of every model."""

    def __init__(
        self,
        settings: Settings,
        deployments: Sequence[ModelDeployment],
        adjustable: Adjustable,
        builder: Builder,
        find_source: FindSource,
    ) -> None:
        # The settings in force; those of a model that was rolled back are the old ones.
        self.settings = settings
        # In the order of the configuration.
        self.deployments = {one.name: one for one in deployments}
        self.fleet = Fleet(builder, self._publish)
        self.discovery = DiscoveredServers(
            self.deployments,
            self.fleet,
            lambda: self.settings.server.drain_timeout_s,
            find_source,
        )
        self.planner = ReloadPlanner(self.deployments, builder, self.fleet)
        self._adjustable = adjustable
        self._services = adjustable.services
        # On-demand models whose engines are being replaced, which must not be loaded meanwhile.
        self._rebuilding: set[str] = set()

    async def apply(self, found: Difference) -> tuple[ModelReport, ...]:
        """Apply a difference; return the outcome for each model."""
        try:
            return await self._apply(found)
        finally:
            for deployment in self.deployments.values():
                deployment.upcoming = ()
                deployment.outgoing = frozenset()
            self._reorder(found.new)

    async def resize(self, model: str, scaled: int) -> tuple[Engine, ...]:
        """Have so many scaled engines of a model, within its bounds; return those to start.

        Those that are not READY go first. Engines that go have drained when this returns.
        """
        deployment = self.deployments[model]
        ready_first = sorted(
            deployment.engines, key=lambda one: one.engine.state is not EngineState.READY
        )
        others = {
            each.config.name
            for one in self.deployments.values()
            for each in (one.members if one is deployment else one.all_engines)
        }
        configs = [one.config for one in ready_first]
        found = plan_engines(configs, deployment.settings, others, scaled)
        added = self.fleet.add(deployment, found.added)
        for config in found.removed:
            await self.fleet.remove(deployment, config.name, self.settings.server.drain_timeout_s)
        return tuple(one.engine for one in added)

    async def _apply(self, found: Difference) -> tuple[ModelReport, ...]:
        self.settings = applied(self.settings, found.new)
        if found.applied:
            self._apply_sections()
        await self._discover_ahead(found.changed)
        removed = [self.deployments.pop(name) for name in found.removed]
        for deployment in removed:
            self.fleet.detach(deployment)
        reports = [ModelReport(one.name, Outcome.REMOVED) for one in removed]
        changed = [change for change in found.changed if not change.needs_engines]
        self._apply_settings(changed)
        await asyncio.gather(*map(self._retire_model, removed))
        for change in found.changed:
            if change.needs_engines:
                if (fault := await self._change_engines(change)) is not None:
                    reports.append(ModelReport(change.new.name, Outcome.ROLLED_BACK, fault))
                else:
                    changed.append(change)
                    self._apply_settings(changed)
        for addition in found.added:
            if not addition.needs_restart:
                fault = await self._add(addition)
                outcome = Outcome.ADDED if fault is None else Outcome.NOT_ADDED
                reports.append(ModelReport(addition.model.name, outcome, fault))
        for change in changed:
            reason = self._name_conflict(change.new)
            reports.append(ModelReport(change.new.name, Outcome.CHANGED, reason))
        return tuple(reports)

    async def _discover_ahead(self, changes: Sequence[ModelChange]) -> None:
        """Discover the servers of new settings before the engines that they may replace go."""
        affected: list[ModelDeployment] = []
        for change in changes:
            deployment = self.deployments[change.new.name]
            before = deployment.settings.discovering
            after = change.effective.discovering
            deployment.upcoming = tuple(one for one in after if one not in before)
            if change.needs_engines:
                old = (*change.plan.removed, *(old for old, _ in change.plan.replaced))
                deployment.outgoing = frozenset(config.name for config in old)
            if deployment.upcoming or (before and deployment.outgoing):
                affected.append(deployment)
        if affected:
            self._publish()
            await self.discovery.wait_until_settled(affected)

    def _apply_sections(self) -> None:
        """Apply the settings outside of models."""
        settings, parts = self.settings, self._adjustable
        parts.services.bounds = RelayBounds.of(settings)
        parts.services.body_memory.bounds = memory_bounds(settings)
        parts.authenticator.replace(settings.api_keys, settings.admin_key, settings.limits.default)
        parts.levels.replace(settings.logs)
        parts.ledger.reprice({}, settings.usage.retention_days)

    def _apply_settings(self, changed: Sequence[ModelChange]) -> None:
        """Apply the new settings of models, without aliases that other models still have.

        Twice, since a model may give up an alias that one before it takes.
        """
        for change in (*changed, *changed):
            deployment = self.deployments[change.new.name]
            others = self._names_of_others(deployment)
            aliases = tuple(alias for alias in change.new.aliases if alias not in others)
            deployment.settings = change.effective.model_copy(update={"aliases": aliases})
            self._open(deployment.settings)
        self._publish()

    def _open(self, model: ModelSettings) -> None:
        """Apply a model's queue settings and price."""
        self._services.admission.open(model.name, model.queue)
        days = self.settings.usage.retention_days
        self._adjustable.ledger.reprice({model.name: model.price}, days)

    def _names_of_others(self, deployment: ModelDeployment | None) -> dict[str, str]:
        """Return the names and aliases of all other models, each with its model."""
        others = (one for one in self.deployments.values() if one is not deployment)
        return {name: one.name for one in others for name in one.settings.names}

    def _name_conflict(self, model: ModelSettings) -> str | None:
        """Return which of a model's names still belong to others; None: no conflict."""
        others = self._names_of_others(self.deployments.get(model.name))
        conflicts = (
            f"{name} is still a name of {others[name]}" for name in model.names if name in others
        )
        return "; ".join(conflicts) or None

    # Engines

    async def _check_overlap(self, old: DeployedEngine, new: EngineConfig) -> OverlapCheck:
        return await self.planner.check_overlap(old, new, self.settings.server.memory_budget_gib)

    def _terms(
        self, *, start: bool, wake: bool, check_overlap: CheckOverlap | None = None
    ) -> ChangeTerms:
        return ChangeTerms(
            drain_s=self.settings.server.drain_timeout_s,
            check_overlap=check_overlap or self._check_overlap,
            start=start,
            wake=wake,
        )

    async def _change_engines(self, change: ModelChange) -> str | None:
        """Change a model's engines; return why it was rolled back."""
        deployment = self.deployments[change.new.name]
        check_overlap: CheckOverlap | None = None
        if deployment.settings.load == "on_demand":
            checks = await self._check_overlaps(change, deployment)
            if checks is None:
                return await self._rebuild(change, deployment)

            async def check_overlap(old: DeployedEngine, new: EngineConfig) -> OverlapCheck:
                # Decided for the model as a whole. A rollback from a successor was not checked yet.
                return checks.get(old.config.name) or await self._check_overlap(old, new)

        running = any(one.engine.state not in IDLE_STATES for one in deployment.engines)
        terms = self._terms(
            start=running or change.new.load == "eager",
            wake=change.becomes_eager,
            check_overlap=check_overlap,
        )
        try:
            await self.fleet.change(deployment, change.plan, terms)
        except NotStarted as error:
            return str(error)
        return None

    async def _check_overlaps(
        self, change: ModelChange, deployment: ModelDeployment
    ) -> dict[str, OverlapCheck] | None:
        """Return the checks for an on-demand model by engine; None: it has to be unloaded first."""
        checks: dict[str, OverlapCheck] = {}
        for old, new in change.plan.replaced if change.overlaps else ():
            deployed = deployment.find(old.name)
            assert deployed is not None
            checks[old.name] = await self._check_overlap(deployed, new)
            if checks[old.name].obstacle or deployed.engine.state is not EngineState.READY:
                return None
        return checks or None

    async def _rebuild(self, change: ModelChange, deployment: ModelDeployment) -> str | None:
        """Unload an on-demand model, change its engines, and load it again if it was loaded."""
        loader, name = self._services.loader, change.new.name
        was_loaded = any(one.engine.state not in IDLE_STATES for one in deployment.engines)
        with self._held(deployment):
            try:
                async with self.fleet.moving_to_successors(deployment, change.plan):
                    await loader.unload(name)
            except GatewayError as error:  # the gateway is shutting down
                return error.message
            if (fault := await self._swap(deployment, change.plan, change.new)) is not None:
                return fault
        if not was_loaded or change.new.load == "eager":
            return None
        try:
            await loader.load(name)
        except GatewayError as error:
            with self._held(deployment):
                await self._swap(
                    deployment, plan_engines(deployment.configs, change.old), change.old
                )
            return error.message
        return None

    @contextlib.contextmanager
    def _held(self, deployment: ModelDeployment) -> Iterator[None]:
        """Have requests for a model wait, and nothing load it, until its engines are replaced."""
        self._rebuilding.add(deployment.name)
        self._publish()
        try:
            yield
        finally:
            self._rebuilding.discard(deployment.name)
            self._publish()

    async def _swap(
        self, deployment: ModelDeployment, plan: EnginePlan, model: ModelSettings
    ) -> str | None:
        """Change the engines of an unloaded model; return what failed."""
        eager = model.load == "eager"
        try:
            await self.fleet.change(deployment, plan, self._terms(start=eager, wake=eager))
        except NotStarted as error:
            return str(error)
        return None

    async def _add(self, addition: Addition) -> str | None:
        """Add a model and start it; return why it was not added."""
        model = addition.model
        if (fault := self._name_conflict(model)) is not None:
            return fault
        deployment = ModelDeployment(model, self.fleet.build(model.name, addition.configs))
        self._open(model)
        self.deployments[model.name] = deployment
        self._publish()
        if model.load == "eager":
            try:
                await self.fleet.start_all(deployment.engines)
            except NotStarted as error:
                del self.deployments[model.name]
                self.fleet.detach(deployment)
                self._publish()
                await self._retire_model(deployment)
                return str(error)
        if model.discovering:
            await self.discovery.wait_until_settled((deployment,))
        return None

    async def _retire_model(self, deployment: ModelDeployment) -> None:
        """Drain and stop a model that has left the catalogue."""
        drain_s = self.settings.server.drain_timeout_s
        admission = self._services.admission
        deadline = asyncio.get_running_loop().time() + drain_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await admission.wait_until_idle(deployment.name)
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        engines = (one.engine for one in deployment.all_engines)
        await asyncio.gather(*(self.fleet.retire(engine, left_s) for engine in engines))
        admission.close(deployment.name)

    def _publish(self) -> None:
        """Give the catalogue, the on-demand loader and discovery the present models."""
        deployments = self.deployments.values()
        self._services.catalogue.replace([one.model() for one in deployments])
        models = (one.on_demand(held=one.name in self._rebuilding) for one in deployments)
        self._services.loader.replace([model for model in models if model is not None])
        self.discovery.update()

    def _reorder(self, new: Settings) -> None:
        """Bring models into the order of the new configuration, and note their settings."""
        order = {model.name: place for place, model in enumerate(new.models)}
        last = len(order)
        ordered = sorted(self.deployments.items(), key=lambda item: order.get(item[0], last))
        self.deployments.clear()
        self.deployments.update(ordered)
        models = tuple(one.settings for one in self.deployments.values())
        self.settings = self.settings.model_copy(update={"models": models})
        self._publish()
