"""Applies a planned difference to the running gateway; a model changes completely or not at all.

Models are removed, then changed one after the other, then added. A model whose new engine fails to
start is rolled back to its old engines and settings; the others are not affected. Splits change
last, once the models that they name have started.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.auth import Authenticator
from app.errors import GatewayError
from app.fleet import (
    ComingChange,
    DiscoveredServers,
    EngineConfig,
    EnginePlan,
    Fleet,
    ModelDeployment,
    NotStarted,
    OverlapCheck,
    Rollout,
    RolloutTerms,
    check_overlap_now,
    moving_to_successors,
    plan_engines,
)
from app.relay import RelayBounds, RelayServices, memory_bounds
from app.reload.difference import Addition, Difference, ModelChange, applied
from app.reload.report import ModelReport, Outcome
from app.settings import ModelSettings, Settings
from app.telemetry.logs import Levels
from app.usage import Ledger
from engines.base import EngineState


@dataclass(frozen=True, slots=True)
class Adjustable:
    """The parts of the gateway that take new settings while they run."""

    services: RelayServices
    authenticator: Authenticator
    ledger: Ledger
    levels: Levels

    def replace(self, settings: Settings) -> None:
        """Apply the settings outside of models."""
        self.services.bounds = RelayBounds.of(settings)
        self.services.body_memory.bounds = memory_bounds(settings)
        self.authenticator.replace(settings.api_keys, settings.admin_key, settings.limits.default)
        self.levels.replace(settings.logs)
        self.ledger.reprice({}, settings.usage.retention_days, settings.usage.currency)


class Applier:
    """Applies differences to a fleet, its discovered servers and the adjustable parts."""

    def __init__(self, fleet: Fleet, servers: DiscoveredServers, adjustable: Adjustable) -> None:
        self._fleet = fleet
        self._servers = servers
        self._adjustable = adjustable
        self._in_force = fleet.in_force

    async def apply(self, found: Difference) -> tuple[ModelReport, ...]:
        """Apply a difference; return the outcome for each model."""
        fleet, in_force = self._fleet, self._in_force
        in_force.settings = applied(in_force.settings, found.new)
        if found.applied:
            self._adjustable.replace(in_force.settings)
        try:
            coming = {fleet.deployments[one.new.name]: one.coming for one in found.changed}
            with fleet.announced(coming):
                await self._discover_ahead(coming)
                return await self._apply(found)
        finally:
            fleet.reorder([model.name for model in found.new.models])
            # Those of a model that was rolled back are the old ones.
            models = tuple(one.settings for one in fleet.deployments.values())
            in_force.settings = in_force.settings.model_copy(update={"models": models})

    async def _apply(self, found: Difference) -> tuple[ModelReport, ...]:
        removed = self._fleet.withdraw(found.removed)
        reports = [ModelReport(one.name, Outcome.REMOVED) for one in removed]
        changed = [one.with_old_split for one in found.changed if not one.needs_engines]
        faults = await self._load_adapters(changed)
        self._apply_settings(changed)
        await asyncio.sleep(0)  # with many models each step takes milliseconds
        await asyncio.gather(*map(self._fleet.retire, removed))
        for change in found.changed:
            if change.needs_engines:
                if (fault := await self._change_engines(change)) is not None:
                    self._fleet.forget_adapters(self._fleet.deployments[change.new.name])
                    reports.append(ModelReport(change.new.name, Outcome.ROLLED_BACK, fault))
                else:
                    faults |= await self._load_adapters([change])
                    changed.append(change.with_old_split)
                    self._apply_settings(changed)
        for addition in sorted(found.added, key=lambda one: bool(one.model.split)):
            if not addition.needs_restart:
                name, fault = addition.model.name, await self._add(addition)
                outcome = Outcome.ADDED if fault is None else Outcome.NOT_ADDED
                warning = self._silent_servers(name, addition.configs) if fault is None else None
                reports.append(ModelReport(name, outcome, fault, warning))
        if any(change.new.split != change.old.split for change in found.changed):
            names = {change.new.name for change in changed}
            changed = [change for change in found.changed if change.new.name in names]
            self._apply_settings(changed)
        owners = self._owners()
        for change in changed:
            reason = _name_conflict(change.new, owners) or faults.get(change.new.name)
            warning = self._silent_servers(change.new.name, change.plan.added)
            reports.append(ModelReport(change.new.name, Outcome.CHANGED, reason, warning))
        return tuple(reports)

    async def _load_adapters(self, changed: Sequence[ModelChange]) -> dict[str, str]:
        """Load the adapters of new settings; return why some were not, by model."""
        coming = [change for change in changed if change.new.adapters]
        found = await asyncio.gather(
            *(
                self._fleet.load_adapters(self._fleet.deployments[one.new.name], one.effective)
                for one in coming
            )
        )
        return {
            change.new.name: "; ".join(faults)
            for change, faults in zip(coming, found, strict=True)
            if faults
        }

    async def _discover_ahead(self, coming: Mapping[ModelDeployment, ComingChange]) -> None:
        """Discover the servers of new settings before the engines that they may replace go."""
        affected = [
            deployment
            for deployment, change in coming.items()
            if change.discovering or (deployment.settings.discovering and change.outgoing)
        ]
        if affected:
            self._fleet.publish()
            await self._servers.wait_until_settled(affected)

    def _apply_settings(self, changed: Sequence[ModelChange]) -> None:
        """Apply the new settings of models, without aliases that other models still have.

        A model without all of its aliases is tried again: one after it may have given them up.
        """
        owners = self._owners()
        incomplete = [change for change in changed if not self._configure(change, owners)]
        for change in incomplete:
            self._configure(change, owners)
        self._reprice([change.effective for change in changed])
        self._fleet.publish()

    def _configure(self, change: ModelChange, owners: dict[str, str]) -> bool:
        """Apply the new settings of a model; return whether it has all of its aliases.

        `owners` has the names of all models.
        """
        name = change.new.name
        deployment = self._fleet.deployments[name]
        for before in deployment.settings.canonical_names:
            owners.pop(before, None)
        aliases = tuple(alias for alias in change.new.aliases if alias not in owners)
        adapters = change.new.adapters
        if adapters is not None:
            adapters = tuple(one for one in adapters if owners.keys().isdisjoint(one.names))
        model = change.effective.model_copy(update={"aliases": aliases, "adapters": adapters})
        owners |= dict.fromkeys(model.canonical_names, name)
        self._fleet.configure(deployment, model)
        return aliases == change.new.aliases and adapters == change.new.adapters

    def _reprice(self, models: Sequence[ModelSettings]) -> None:
        usage = self._in_force.settings.usage
        prices = {name: price for model in models for name, price in model.prices.items()}
        self._adjustable.ledger.reprice(prices, usage.retention_days, usage.currency)

    def _silent_servers(self, model: str, added: Sequence[EngineConfig]) -> str | None:
        """Return which of a model's new remote servers do not respond; None: all do."""
        found = (self._fleet.deployments[model].find(config.name) for config in added)
        engines = [one.engine for one in found if one is not None]
        silent = [
            f"engine {engine.name} does not respond yet: {engine.last_error or engine.state}"
            for engine in engines
            if not engine.capabilities.managed and engine.state is not EngineState.READY
        ]
        return "; ".join(silent) or None

    def _owners(self) -> dict[str, str]:
        """Return the names and aliases of all models, each with its model."""
        deployments = self._fleet.deployments.values()
        return {name: one.name for one in deployments for name in one.settings.canonical_names}

    # Engines

    async def _change_engines(self, change: ModelChange) -> str | None:
        """Change a model's engines; return why it was rolled back."""
        deployment = self._fleet.deployments[change.new.name]
        self._fleet.announce_adapters(deployment, change.new)
        checks: Mapping[str, OverlapCheck] = {}
        if deployment.settings.load == "on_demand":
            found = await self._check_overlaps(change, deployment)
            if found is None:
                return await self._rebuild(change, deployment)
            checks = found
        start = deployment.is_running or change.new.load == "eager"
        terms = RolloutTerms(start, change.becomes_eager, checks)
        return await self._roll_out(deployment, change.plan, terms)

    async def _check_overlaps(
        self, change: ModelChange, deployment: ModelDeployment
    ) -> dict[str, OverlapCheck] | None:
        """Return the checks for an on-demand model by engine; None: it has to be unloaded first."""
        checks: dict[str, OverlapCheck] = {}
        for old, new in change.plan.replaced if change.overlaps else ():
            deployed = deployment.get(old.name)
            checks[old.name] = await check_overlap_now(self._fleet, deployed, new)
            if checks[old.name].obstacle or deployed.engine.state is not EngineState.READY:
                return None
        return checks or None

    async def _rebuild(self, change: ModelChange, deployment: ModelDeployment) -> str | None:
        """Unload an on-demand model, change its engines, and load it again if it was loaded."""
        fleet, name = self._fleet, change.new.name
        was_loaded = deployment.is_running
        with fleet.held(deployment):
            try:
                async with moving_to_successors(deployment, change.plan):
                    await fleet.loader.unload(name)
            except GatewayError as error:  # the gateway is shutting down
                return error.message
            if (fault := await self._swap(deployment, change.plan, change.new)) is not None:
                return fault
        if not was_loaded or change.new.load == "eager":
            return None
        try:
            await fleet.loader.load(name)
        except GatewayError as error:
            with fleet.held(deployment):
                plan = plan_engines(deployment.configs, change.old)
                await self._swap(deployment, plan, change.old)
            return error.message
        return None

    async def _swap(
        self, deployment: ModelDeployment, plan: EnginePlan, model: ModelSettings
    ) -> str | None:
        """Change the engines of an unloaded model; return what failed."""
        eager = model.load == "eager"
        return await self._roll_out(deployment, plan, RolloutTerms(eager, eager))

    async def _roll_out(
        self, deployment: ModelDeployment, plan: EnginePlan, terms: RolloutTerms
    ) -> str | None:
        """Carry out a plan; return why it was rolled back."""
        try:
            await Rollout(self._fleet, deployment, terms).run(plan)
        except NotStarted as error:
            return str(error)
        return None

    async def _add(self, addition: Addition) -> str | None:
        """Add a model and start it; return why it was not added."""
        model = addition.model
        if (fault := _name_conflict(model, self._owners())) is not None:
            return fault
        self._reprice([model])
        try:
            deployment = await self._fleet.add(model, addition.configs)
        except NotStarted as error:
            return str(error)
        if model.discovering:
            await self._servers.wait_until_settled((deployment,))
        return None


def _name_conflict(model: ModelSettings, owners: Mapping[str, str]) -> str | None:
    """Return which of a model's names still belong to others; None: no conflict."""
    conflicts = (
        f"{name} is still a name of {owners[name]}"
        for name in model.canonical_names
        if owners.get(name, model.name) != model.name
    )
    return "; ".join(conflicts) or None
