"""A model with its settings in force and the engines that run it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from app.fleet.engine_plan import EngineConfig
from app.residency import OnDemandModel
from app.routing import POLICIES, Bounds, ContinuationTerms, Model, Replica, SelectionPolicy
from app.settings import AdapterSettings, ModelSettings, Settings
from engines.adapters import AdapterSources
from engines.base import Engine, EngineState
from engines.plan import media_of_model
from engines.spec import EngineSpec, LocalSpec

# States of an engine that was not requested to run. A model on demand leaves an engine FAILED
# after a failed load.
IDLE_STATES = frozenset({EngineState.STOPPED, EngineState.ASLEEP, EngineState.FAILED})
# Builds the engine of a config, which is not started; the first argument is the model's name.
BuildEngine = Callable[[str, EngineConfig], Replica]


@dataclass(slots=True, eq=False)
class DeployedEngine:
    """An engine and the config that it was built from."""

    config: EngineConfig
    replica: Replica

    @property
    def engine(self) -> Engine:
        return self.replica.engine


@dataclass(slots=True, eq=False)
class ModelDeployment:
    """A model: the settings in force, and its engines."""

    settings: ModelSettings
    # Those of the configuration.
    engines: list[DeployedEngine]
    # Discovered servers that get requests, by name. `app.fleet.members` adds and removes them.
    members: list[DeployedEngine] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    # Starts alongside the engine that it replaces. Requests and operators see it; the on-demand
    # loader does not before it has taken over.
    successor: DeployedEngine | None = None
    # Loaded on demand, and not to be loaded until its engines have been replaced.
    held: bool = False
    # Adapters that are loaded before a reload lists them, and those that it has removed, which
    # requests may still need: where each is loaded from, by name.
    coming_adapters: AdapterSources = field(default_factory=dict)
    leaving_adapters: AdapterSources = field(default_factory=dict)
    # Of the model and its adapters, which have the same engines and their caches. Kept across
    # reloads that do not change it, with all that it has learned.
    _policy: SelectionPolicy | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def all_engines(self) -> tuple[DeployedEngine, ...]:
        """Every engine that requests see."""
        return (*self.engines, *self.members)

    @property
    def is_running(self) -> bool:
        """True if one of the configuration's engines was requested to run."""
        return any(one.engine.state not in IDLE_STATES for one in self.engines)

    @property
    def configs(self) -> tuple[EngineConfig, ...]:
        """Those of the configuration's engines."""
        return tuple(deployed.config for deployed in self.engines)

    def find(self, name: str) -> DeployedEngine | None:
        """Return the engine of the configuration with a name."""
        return next((deployed for deployed in self.engines if deployed.config.name == name), None)

    def get(self, name: str) -> DeployedEngine:
        """Return the engine of the configuration with a name, which has to be there."""
        found = self.find(name)
        assert found is not None
        return found

    def on_demand(self) -> OnDemandModel | None:
        """Return the model for the on-demand loader; None if it is always loaded."""
        if self.settings.load == "eager":
            return None
        replicas = [
            one.replica
            for one in self.engines
            if one is not self.successor and one.engine.capabilities.unloadable
        ]
        return OnDemandModel(
            self.settings,
            tuple(replica.engine for replica in replicas),
            lambda: sum(replica.move_streams() for replica in replicas),
            self.held,
        )

    def want_adapters(self, *joining: Engine) -> None:
        """Have every engine, and those that are about to join, load the adapters and no others."""
        present = adapter_sources(self.settings)
        wanted = {**self.leaving_adapters, **present, **self.coming_adapters}
        for engine in (*(deployed.engine for deployed in self.all_engines), *joining):
            engine.want_adapters(wanted)

    def models(self, *, discovered: bool | None = None) -> list[Model]:
        """Return the model and its adapters for the catalogue.

        `discovered` overrides what the settings say.
        """
        model = self._model(discovered)
        return [model, *(self._adapter(model, one) for one in self.settings.adapters or ())]

    def _adapter(self, model: Model, adapter: AdapterSettings) -> Model:
        return replace(
            model,
            name=adapter.name,
            aliases=adapter.aliases,
            limits=adapter.limits,
            fallbacks=adapter.fallbacks,
            parent=model.name,
            split=(),
            adapter_source=adapter.source,
        )

    def _policy_in_force(self) -> SelectionPolicy:
        wanted = POLICIES[self.settings.policy]
        if type(self._policy) is not wanted:
            self._policy = wanted()
        return self._policy

    def _model(self, discovered: bool | None) -> Model:
        settings = self.settings
        return Model(
            settings.name,
            settings.aliases,
            tuple(deployed.replica for deployed in self.all_engines),
            bounds=Bounds(
                settings.max_choices,
                settings.max_output_tokens,
                settings.max_sequences,
                settings.max_inputs,
            ),
            limits=settings.limits,
            on_demand=settings.load == "on_demand",
            policy=self._policy_in_force(),
            slots=settings.queue.max_in_flight,
            eject_after=settings.eject_after,
            fallbacks=settings.fallbacks,
            fields=settings.fields,
            isolation=settings.isolation,
            media_domains=frozenset(settings.media.domains),
            units=settings.units,
            read_media=partial(_read_media, [one.config.spec for one in self.engines]),
            stores_responses=settings.stores_responses,
            both_reasoning_fields=settings.reasoning_field == "both",
            created=self.created,
            load_wait_s=settings.load_wait_s,
            max_waiting=settings.queue.max_waiting,
            continuation=_continuation_terms(settings),
            discovered=bool(settings.discovering) if discovered is None else discovered,
            split=settings.split,
            engineless=not settings.engines,
        )


def _read_media(specs: Sequence[EngineSpec]) -> frozenset[str] | None:
    """Return the kinds of media that any of some engines takes; None: not known."""
    taken: frozenset[str] = frozenset()
    for spec in specs:
        found = None
        if isinstance(spec, LocalSpec) and spec.model_here is not None:
            found = media_of_model(spec.model_here, spec.args, spec.env)
        if found is None:
            return None
        taken |= found
    return taken


def adapter_sources(settings: ModelSettings) -> dict[str, str | None]:
    """Return where each adapter of a model is loaded from, by name."""
    return {adapter.name: adapter.source for adapter in settings.adapters or ()}


def _continuation_terms(model: ModelSettings) -> ContinuationTerms | None:
    """Return the terms on which a model's streams go on; None: they do not."""
    if not model.continues_streams:
        return None
    return ContinuationTerms(model.continuation_wait_s, model.continuation_max_tokens)


def build_deployments(
    settings: Settings, configs: Mapping[str, Sequence[EngineConfig]], build: BuildEngine
) -> list[ModelDeployment]:
    """Return every model with its engines, none of them started."""
    deployments = [
        ModelDeployment(
            model,
            [DeployedEngine(config, build(model.name, config)) for config in configs[model.name]],
        )
        for model in settings.models
    ]
    for deployment in deployments:
        deployment.want_adapters()
    return deployments


def memory_gib(engine: Engine) -> float:
    """Return the memory that an engine takes on this machine; 0 if unknown."""
    return 0.0 if engine.capabilities.elsewhere else engine.memory_gib or 0.0
