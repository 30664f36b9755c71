"""Measures the models whose engines are scaled, and has engines started and stopped for them."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from app.admission import Admission
from app.fleet import DeployedEngine, Fleet, ModelDeployment, ensure_ready, scaled_engines
from app.routing import Replica, count_slots
from app.scaling.policy import Load, ScalingPolicy, ScalingTerms
from engines.background_tasks import BackgroundTasks
from engines.base import Engine, EngineNotReady, EngineState
from engines.spec import RemoteSpec

log = logging.getLogger(__name__)

INTERVAL_S = 5.0


@dataclass(slots=True, eq=False)
class _Scaled:
    """A model that is scaled: its policy, and the step that is under way."""

    deployment: ModelDeployment
    policy: ScalingPolicy
    wanted: int
    step: asyncio.Task[None] | None = None


class Autoscaler:
    """Scales models of the present configuration until it is canceled."""

    def __init__(self, fleet: Fleet, admission: Admission, startup_done: asyncio.Event) -> None:
        """`startup_done` is set once the engines that start with the gateway have settled."""
        self._fleet = fleet
        self._admission = admission
        self._startup_done = startup_done
        # By name; models of the configuration that are scaled.
        self._models: dict[str, _Scaled] = {}
        self._steps = BackgroundTasks(log)

    def wanted(self) -> Iterator[tuple[str, int]]:
        """Yield each model that is scaled with the number of engines that it should have.

        Servers that are READY are among them, as they are among the model's engines.
        """
        for name, scaled in self._models.items():
            yield name, scaled.wanted + len(_ready_servers(scaled.deployment))

    @property
    def stepping(self) -> bool:
        """True while engines that were decided start or drain."""
        return bool(self._steps)

    async def run(self) -> None:
        """Decide again and again. Steps of different models run at the same time."""
        clock = asyncio.get_running_loop().time
        try:
            await self._startup_done.wait()
            while True:
                self.decide(clock())
                await asyncio.sleep(INTERVAL_S)
        finally:
            await self._steps.cancel()

    def decide(self, now: float) -> None:
        """Begin a step for each model that needs one, unless its previous one is under way.

        None begins while the gateway drains.
        """
        if self._admission.draining:
            return
        self._follow(self._fleet.deployments)
        for name, scaled in self._models.items():
            try:
                self._decide(name, scaled, now)
            except Exception:
                log.exception("model %s could not be scaled", name, extra={"model": name})

    def _decide(self, name: str, scaled: _Scaled, now: float) -> None:
        load = self._load_of(scaled.deployment)
        wanted = scaled.policy.decide(now, load)
        if scaled.step is not None and not scaled.step.done():
            return
        scaled.wanted = wanted
        more = min(wanted - load.engines, _room(scaled.deployment))
        if more:
            log.info(
                "model %s: engines: %d, wanted: %d; in flight: %d, waiting: %d",
                *(name, load.engines, load.engines + more, load.in_flight, load.waiting),
                extra={"model": name},
            )
            scaled.step = self._steps.start(self._step(name, more), f"scale {name}")

    def _follow(self, deployments: Mapping[str, ModelDeployment]) -> None:
        """Forget models that are not scaled any more, and apply new terms to the others."""
        present = {
            name: terms for name, one in deployments.items() if (terms := terms_of(one)) is not None
        }
        for name in self._models.keys() - present.keys():
            del self._models[name]
        for name, terms in present.items():
            known = self._models.get(name)
            if known is None or known.deployment is not deployments[name]:
                policy = ScalingPolicy(terms)
                self._models[name] = _Scaled(deployments[name], policy, terms.least)
            else:
                # A reload changes the bounds, and not what was measured.
                known.policy.terms = terms

    def _load_of(self, deployment: ModelDeployment) -> Load:
        """Return what a model has to do; engines that are not scaled work on it, too.

        One that was given up is none: others may be needed in its place.
        """
        in_flight, waiting = self._admission.counts(deployment.name)
        engines = [one.engine for one in _managed(deployment) if not one.engine.given_up]
        starts = [engine.load_s for engine in engines if engine.load_s is not None]
        return Load(
            in_flight,
            waiting,
            self._admission.ended(deployment.name),
            engines=len(engines),
            ready=sum(engine.state is EngineState.READY for engine in engines),
            servers=_count_servers(deployment),
            start_s=max(starts, default=None),
        )

    async def _step(self, name: str, more: int) -> None:
        """Carry out a step; return when engines that go have ended, and others begin to start.

        It does not wait for these: one that finds no room starts for ever.
        """
        deployment = self._fleet.deployments.get(name)
        if deployment is None:  # removed just now
            return
        present = scaled_engines(deployment.configs, deployment.settings)
        added = await self._fleet.resize(name, present + more)
        for engine in added:
            self._steps.start(_start(engine), f"start {engine.name}")


def terms_of(deployment: ModelDeployment) -> ScalingTerms | None:
    """Return the terms on which a model is scaled; None: it is not."""
    settings = deployment.settings
    bounds, slots = settings.scaling, settings.queue.max_in_flight
    if bounds is None or not isinstance(slots, int):
        return None
    fixed = len(_managed(deployment)) - scaled_engines(deployment.configs, settings)
    return ScalingTerms(fixed + bounds.min, fixed + bounds.max, slots, bounds.target_wait_s)


def _managed(deployment: ModelDeployment) -> list[DeployedEngine]:
    """Return the engines that this gateway runs."""
    return [one for one in deployment.engines if not isinstance(one.config.spec, RemoteSpec)]


def _ready_servers(deployment: ModelDeployment) -> list[Replica]:
    """Return those that this gateway does not run and that take requests."""
    return [
        one.replica
        for one in deployment.all_engines
        if isinstance(one.config.spec, RemoteSpec) and one.engine.state is EngineState.READY
    ]


def _count_servers(deployment: ModelDeployment) -> float:
    """Return the servers that take requests as a number of engines; see `Load`."""
    servers, slots = _ready_servers(deployment), deployment.settings.queue.max_in_flight
    if not servers or not isinstance(slots, int):
        return 0.0
    return count_slots(servers, slots) / slots


def _room(deployment: ModelDeployment) -> int:
    """Return how many engines may be added; one that was given up keeps its place."""
    bounds = deployment.settings.scaling
    present = scaled_engines(deployment.configs, deployment.settings)
    return 0 if bounds is None else max(bounds.max - present, 0)


async def _start(engine: Engine) -> None:
    try:
        await ensure_ready(engine)
    except EngineNotReady as error:
        if engine.state is EngineState.STOPPED:  # it is not needed any more
            return
        log.error("engine %s did not start: %s", engine.name, error, extra={"engine": engine.name})
    else:
        log.info("engine %s is ready", engine.name, extra={"engine": engine.name})
