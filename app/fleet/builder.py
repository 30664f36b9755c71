"""Builds engines from their settings, and places them on GPUs; starts none."""

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from app.fleet.engine_plan import EngineConfig, config_hash
from app.routing import Replica
from app.settings import ConfigError, ModelSettings, Settings
from engines import interpreter
from engines.base import Engine
from engines.container import ContainerEngine, find_socket
from engines.gpu import (
    VISIBLE_DEVICES,
    Accelerator,
    AcceleratorError,
    AssumedGpus,
    Device,
    Placement,
    PlacementError,
    PlacementRequest,
    find_accelerator,
    place,
    visible_devices,
)
from engines.inprocess import InProcessEngine
from engines.plan import find_adapter_fault
from engines.process import LauncherMissing, ProcessEngine, vllm_launcher
from engines.ray import Cluster, RayEngine, ray_is_installed
from engines.remote import RemoteEngine
from engines.setup import EngineSetup
from engines.spec import (
    ContainerSpec,
    InProcessSpec,
    LocalSpec,
    ManagedSpec,
    ProcessSpec,
    RaySpec,
    RemoteSpec,
)

# Models with the configs of their engines.
EnginesByModel = Sequence[tuple[ModelSettings, Sequence[EngineConfig]]]
# EnginesByModel with the GPUs that were assigned to them.
Placed = Sequence[tuple[EngineConfig, Placement]]


class Builder:
    """Builds engines, and holds what those of one machine share."""

    def __init__(self, settings: Settings, launcher: Sequence[str] | None = None) -> None:
        """`launcher` runs vLLM's server; default: this interpreter's vLLM."""
        self._assumed: AssumedGpus | None = None
        self._run_dir = settings.server.run_dir.absolute()
        self._keep = settings.server.keep_engines
        self._launcher = launcher
        # A reload adds to it: later engines do not inherit those variables either.
        self._withheld = set(settings.key_variables)
        # Held by each engine that loads.
        self._turn = asyncio.Semaphore(settings.server.parallel_starts)
        # Read now: an in-process engine may set it in our environment later.
        self._visible = os.environ.get(VISIBLE_DEVICES)
        self._accelerator: Accelerator | None = None
        # Not connected before an engine needs it.
        self._cluster = Cluster(settings.ray.address, settings.ray.namespace, self._run_dir)
        self._tls = settings.ray.tls
        self._containers = settings.containers
        # Latest last; placements of replaced engines stay for a rollback.
        self._placed: list[tuple[EngineConfig, Placement]] = []

    def place(
        self, configs: EnginesByModel, alongside: Mapping[str, Placement] | None = None
    ) -> Placed:
        """Return the GPUs of the engines whose spec has `gpus`; assigned ones are kept.

        `alongside` has those of engines that start alongside the ones they replace, by name. Blocks
        on the driver if any spec has `gpus`. Raises ConfigError.
        """
        requests = [
            PlacementRequest(
                config.name, model.name, config.spec, on_demand=model.load == "on_demand"
            )
            for model, engines in configs
            for config in engines
            if isinstance(config.spec, LocalSpec)
        ]
        if all(request.spec.gpus is None for request in requests):
            return ()
        keep = {**self.placements(configs), **(alongside or {})}
        try:
            present = self.accelerator.devices()
        except AcceleratorError as error:
            raise ConfigError([f"the GPUs of this machine are unknown: {error}"]) from None
        devices = visible_devices(present, self._visible)
        try:
            found = place(requests, devices, keep)
        except PlacementError as error:
            hidden = len(present) - len(devices)
            note = f"{VISIBLE_DEVICES} of the gateway hides {hidden} of {len(present)} GPUs"
            raise ConfigError([*error.faults, note] if hidden else error.faults) from None
        return [
            (config, found[config.name])
            for _, engines in configs
            for config in engines
            if config.name in found
        ]

    def placements(self, configs: EnginesByModel) -> dict[str, Placement]:
        """Return the GPUs of the engines that were assigned some, by name."""
        return {
            config.name: placement
            for _, engines in configs
            for config in engines
            if (placement := self._placement(config)) is not None
        }

    def devices(self) -> Sequence[Device]:
        """Return the GPUs that engines may use. Blocks. Raises AcceleratorError."""
        return visible_devices(self.accelerator.devices(), self._visible)

    def withhold(self, variables: Iterable[str]) -> None:
        """Withhold these environment variables from engines that start from now on."""
        self._withheld.update(variables)

    def use(self, placed: Placed) -> None:
        """Assign these GPUs to engines that are built from now on."""
        self._placed += placed

    @property
    def runs_vllm(self) -> bool:
        """True if engines run this interpreter's vLLM."""
        return self._launcher is None

    def assume(self, gpus: AssumedGpus) -> None:
        """Place engines on the GPUs of another machine, for a check; none may be started."""
        self._accelerator = self._assumed = gpus
        self._visible = None

    @property
    def assumes_gpus(self) -> bool:
        """True if engines are placed on the GPUs of another machine."""
        return self._assumed is not None

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator of this machine; the first call blocks to find it."""
        if self._accelerator is None:
            self._accelerator = find_accelerator()
        return self._accelerator

    def __call__(self, model: str, config: EngineConfig) -> Replica:
        """Return an engine that is not started. Raises LauncherMissing."""
        spec = config.spec
        if isinstance(spec, RemoteSpec):
            served_name = spec.served_model_name or model
            serves = served_name if config.discovered else None
            return Replica(RemoteEngine(config.name, spec, serves), served_name)
        return Replica(self._build(model, config, spec), model, by_priority=spec.by_priority)

    def _build(self, model: str, config: EngineConfig, spec: ManagedSpec) -> Engine:
        """Return an engine that the gateway runs, of the kind of its spec."""
        setup = self._setup(model, config)
        match spec:
            case ProcessSpec():
                launcher = self._launcher or _launcher(spec)
                return ProcessEngine(setup, spec, launcher, downloads=self._launcher is None)
            case ContainerSpec():
                socket = find_socket(self._containers.socket, os.environ)
                return ContainerEngine(setup, spec, socket)
            case InProcessSpec():
                if self._launcher is None:
                    vllm_launcher()  # raises if vLLM is missing
                return InProcessEngine(setup, spec)
            case RaySpec():
                if not ray_is_installed():
                    raise LauncherMissing(
                        "Ray is not installed here, which kind: ray needs: run `make setup-ray` in "
                        "a clone, or `pip install '.[ray]'` there"
                    )
                return RayEngine(setup, spec, self._cluster, launcher=self._launcher, tls=self._tls)
        raise TypeError(type(spec))

    def _setup(self, model: str, config: EngineConfig) -> EngineSetup:
        spec, placement = config.spec, self._placement(config)
        setup = EngineSetup(
            name=config.name,
            served_name=model,
            run_dir=self._run_dir,
            env=placement.env if placement else {},
            withheld=self._withheld,
            turn=self._turn,
            keep=self._keep,
            media_domains=config.media_domains,
            mark=config_hash(model, config),
            gpus=placement.devices if placement else None,
            accelerator=lambda: self.accelerator,
            lora=config.lora,
        )
        if isinstance(spec, LocalSpec):
            return replace(setup, find_adapter_fault=partial(find_adapter_fault, spec))
        return setup

    def _placement(self, config: EngineConfig) -> Placement | None:
        placements = (placement for one, placement in reversed(self._placed) if one == config)
        return next(placements, None)


def _launcher(spec: ProcessSpec) -> Sequence[str]:
    """Return the command that runs an engine's vLLM. Raises LauncherMissing."""
    return vllm_launcher() if spec.python is None else interpreter.launcher(spec.python)
