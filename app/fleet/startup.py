"""The engines of a gateway from its start to its end: built, adopted, started, released, stopped.

`build_models` makes every engine of the configuration, with the names and GPUs of engines that an
earlier gateway left running. `EngineLifecycle` starts them in the order of the configuration while
the gateway already answers, and stops them, or leaves them to the next gateway.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from app.errors import GatewayError
from app.fleet.builder import Builder
from app.fleet.deployment import ModelDeployment, build_deployments
from app.fleet.detached import STOP_GRACE_S
from app.fleet.engine_plan import config_hash, initial_engines
from app.fleet.starting import ensure_ready
from app.residency import OnDemandLoader
from app.routing import Catalogue
from app.settings import InForce, Settings
from app.telemetry.metrics import Metrics
from app.telemetry.traces import tracer_for
from engines.base import Engine, EngineNotReady, EngineState
from engines.gpu import Placement
from engines.guard.guardian_client import RECORD_FILE, stop_unconfigured
from engines.process import LaunchOrigin

log = logging.getLogger(__name__)

# Time for engines that run already to become READY here; it takes a tenth of a second unless one
# is still loading or does not answer.
RUNNING_ENGINES_S = 5.0


def build_models(
    settings: Settings, builder: Builder, running: Mapping[str, LaunchOrigin]
) -> list[ModelDeployment]:
    """Return every model with its engines, none of them started.

    `running` has the engines that an earlier gateway left, by name. Those that run what is
    configured keep their names and their GPUs. Raises LauncherMissing, and ConfigError when the
    GPUs that engines ask for do not fit.
    """
    configs = initial_engines(settings, {name: origin.mark for name, origin in running.items()})
    builder.use(
        [
            (config, Placement.on(gpus))
            for model, engines in configs.items()
            for config in engines
            if (origin := running.get(config.name)) is not None
            if origin.mark == config_hash(model, config)
            if (gpus := origin.gpus) is not None
        ]
    )
    builder.use(builder.place([(model, configs[model.name]) for model in settings.models]))
    return build_deployments(settings, configs, builder)


def catalogue_of(settings: Settings, builder: Builder) -> Catalogue:
    """Return the models of a configuration. Raises what `create_app` does."""
    tracer_for(settings.traces)
    deployments = build_models(settings, builder, {})
    return Catalogue([model for deployment in deployments for model in deployment.models()])


def eager_memory_gib(catalogue: Catalogue) -> float:
    """Return the memory here of the engines that are always loaded, as far as it is known."""
    engines = (r.engine for m, r in catalogue.replicas() if not m.on_demand)
    return sum(e.memory_gib or 0.0 for e in engines if not e.capabilities.elsewhere)


def adoptable_engines(
    deployments: Iterable[ModelDeployment], running: Mapping[str, LaunchOrigin]
) -> frozenset[str]:
    """Return the names of the engines that run as they are configured.

    `running` has the engines that an earlier gateway left, by name.
    """
    return frozenset(
        config.name
        for deployment in deployments
        for config in deployment.configs
        if (origin := running.get(config.name)) is not None
        if origin.mark == config_hash(deployment.name, config)
    )


class EngineLifecycle:
    """Starts the engines of a catalogue in the background, and stops them at the end."""

    def __init__(
        self,
        catalogue: Catalogue,
        loader: OnDemandLoader,
        metrics: Metrics,
        run_dir: Path,
        in_force: InForce,
        adoptable: Collection[str] = (),
        discovered: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`adoptable` are the names of the engines that an earlier gateway left.

        `discovered` returns, soon, when discovered servers have been checked.
        """
        self._discovered = discovered or _none_discovered
        self._adoptable = adoptable
        self._catalogue = catalogue
        self._loader = loader
        self._metrics = metrics
        self._run_dir = run_dir
        self._in_force = in_force
        self._task: asyncio.Task[None] | None = None
        # The engines that this gateway is going to start, until they are asked to.
        self._unasked: set[Engine] = set()
        # Set when every engine that starts with the gateway has been READY or FAILED.
        self.engines_tried = asyncio.Event()
        # Set when an engine is READY, or none of the first will be by a restart. While these find
        # no place in a cluster, or a reload has replaced one, only a READY engine sets it.
        self.startup_done = asyncio.Event()
        # Whether no model could ever be served when `startup_done` was set.
        self.hopeless = False

    @property
    def _keep_engines(self) -> bool:
        """Whether engines outlive this gateway."""
        return self._in_force.settings.server.keep_engines

    def start(self) -> None:
        """Start the engines in the background, so that /health answers meanwhile."""
        self._unasked = {r.engine for m, r in self._catalogue.replicas() if not m.on_demand}
        self._task = asyncio.create_task(self._start_all(), name="start engines")

    def is_about_to_start(self, engine: Engine) -> bool:
        """Return whether an engine has yet to be asked to start.

        Before that, what an earlier gateway left is ended. Requests wait as for a start.
        """
        return engine in self._unasked and engine.capabilities.managed

    async def wait_for_running_engines(self) -> None:
        """Return when engines that run already are found, or RUNNING_ENGINES_S later.

        Those are the engines of an earlier gateway and remote ones. A model needs one of them:
        until then its requests would be refused that a moment later are served.
        """
        keeps = self._keep_engines
        models = [
            model
            for model in self._catalogue.models
            if model.owns_engines and (keeps or not model.on_demand)
        ]
        running = [
            [
                replica.engine
                for replica in model.replicas
                if replica.engine.name in self._adoptable
                or not (has := replica.engine.capabilities).managed
                or (keeps and has.elsewhere)  # only its cluster knows whether it runs
            ]
            for model in models
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RUNNING_ENGINES_S):
                await self._catalogue.changes.wait_for(lambda: all(map(_is_found, running)))
                await self._discovered()

    async def cancel_start(self) -> None:
        """Stop starting engines; those that were started go on."""
        if self._task is not None:
            self._task.cancel()
            self._unasked.clear()
            await asyncio.gather(self._task, return_exceptions=True)

    async def release_engines(self) -> None:
        """Let go of the engines that outlive this gateway; their requests in flight go on."""
        if self._keep_engines:
            await asyncio.gather(*(engine.release() for engine in self._catalogue.engines))

    async def stop_engines(self) -> None:
        """Release the engines that outlive this gateway, and stop all others."""
        await self.release_engines()
        await asyncio.gather(*(engine.stop(STOP_GRACE_S) for engine in self._catalogue.engines))

    async def _start_all(self) -> None:
        catalogue = self._catalogue
        try:
            await stop_unconfigured(self._run_dir, {engine.name for engine in catalogue.engines})
        except OSError as error:
            log.warning("engines that an earlier gateway left are not ended: %s", error)
        await asyncio.gather(
            *(self._start(m.name, r.engine) for m, r in catalogue.replicas() if not m.on_demand),
            *(self._adopt(name) for name in self._left_loaded()),
            self._discovered(),
        )
        # From here on a reload may replace engines.
        started = tuple(catalogue.engines)
        self.engines_tried.set()
        await catalogue.changes.wait_for(
            lambda: catalogue.ready or not any(map(_may_restart, started))
        )
        self.hopeless = self._is_hopeless(started)
        self.startup_done.set()

    def _is_hopeless(self, started: Sequence[Engine]) -> bool:
        """Return whether all engines have used up their restarts, and no reload brings others.

        A model loaded on demand is tried again at its next request, and a server of a discovered
        one may come.
        """
        catalogue = self._catalogue
        if any(model.on_demand or model.discovered for model in catalogue.models):
            return False
        return set(catalogue.engines) == set(started) and all(e.given_up for e in started)

    async def _start(self, model: str, engine: Engine) -> None:
        self._unasked.discard(engine)
        try:
            await ensure_ready(engine)
        except EngineNotReady as error:
            log.debug(
                "engine %s did not start: %s", engine.name, error, extra={"engine": engine.name}
            )
        else:
            log.info("engine %s is ready", engine.name, extra={"engine": engine.name})
            if engine.load_s is not None:
                self._metrics.engine_load.observe((model,), engine.load_s)

    def _left_loaded(self) -> list[str]:
        """Return the models on demand that an earlier gateway left loaded."""
        if not self._keep_engines:
            return []
        return [
            model.name
            for model in self._catalogue.models
            if model.on_demand and model.owns_engines
            if any((self._run_dir / r.engine.name / RECORD_FILE).exists() for r in model.replicas)
        ]

    async def _adopt(self, model: str) -> None:
        """Load a model that an earlier gateway left loaded, so that its memory is counted."""
        try:
            await self._loader.load(model)
        except GatewayError as error:
            event = "could not adopt model %s from the previous gateway: %s"
            log.warning(event, model, error, extra={"model": model})


def _may_restart(engine: Engine) -> bool:
    """Return whether an engine may become READY by a restart, or is about to be replaced.

    Not one that an operator has stopped.
    """
    if not engine.capabilities.managed or engine.given_up:
        return False
    return engine.retired or engine.state is not EngineState.STOPPED


async def _none_discovered() -> None:
    """Return at once: no server is discovered."""


def _is_found(engines: Sequence[Engine]) -> bool:
    """Return whether one of the engines is READY, or none will be soon."""
    starting = (EngineState.STOPPED, EngineState.STARTING)
    states = [engine.state for engine in engines]
    return EngineState.READY in states or not any(state in starting for state in states)


def engine_states(catalogue: Catalogue) -> Iterator[tuple[str, str, str]]:
    """Yield model, name and state of each engine."""
    for model, replica in catalogue.replicas():
        yield model.name, replica.engine.name, str(replica.engine.state)
