"""From what the configuration says of engines to engines that are not started, GPUs included."""

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence

from app.fleet.slots import Slot, config_hash
from app.routing import Replica
from app.settings import ConfigError, ModelSettings, Settings
from engines.gpu.accelerator import Accelerator, AcceleratorError, Device, find_accelerator
from engines.gpu.placement import (
    VISIBLE,
    Placement,
    PlacementError,
    PlacementRequest,
    place,
    visible,
)
from engines.inprocess import InProcessEngine
from engines.process import ProcessEngine, vllm_launcher
from engines.remote import RemoteEngine
from engines.spec import InProcessSpec, LocalSpec, ProcessSpec

# Models with the slots of their engines.
Slots = Sequence[tuple[ModelSettings, Sequence[Slot]]]
# Slots with the GPUs that were found for them.
Placed = Sequence[tuple[Slot, Placement]]


class Builder:
    """Makes engines, and knows what those of one machine have in common."""

    def __init__(self, settings: Settings, launcher: Sequence[str] | None = None) -> None:
        """`launcher` runs vLLM's server, default: this interpreter's vLLM."""
        self._run_dir = settings.server.run_dir.absolute()
        self._keep = settings.server.keep_engines
        self._launcher = launcher
        # Grows with a reload: engines that start later do not inherit those either.
        self._withheld = set(settings.key_variables)
        # Held by the one that loads.
        self._turn = asyncio.Semaphore(settings.server.parallel_starts)
        # An engine of the gateway's own process may set it in our environment later.
        self._visible = os.environ.get(VISIBLE)
        self._accelerator: Accelerator | None = None
        # The newest at the end; one that was replaced is still there for a way back.
        self._placed: list[tuple[Slot, Placement]] = []

    def place(self, slots: Slots, beside: Mapping[str, Placement] | None = None) -> Placed:
        """Return the GPUs of the engines whose spec has `gpus`; those that have some keep them.

        `beside` has those of engines that start beside the ones they replace, by name. The driver
        is asked only where some spec has `gpus`; that blocks. Raises ConfigError.
        """
        wishes = [
            PlacementRequest(slot.name, model.name, slot.spec, on_demand=model.load == "on_demand")
            for model, engines in slots
            for slot in engines
            if isinstance(slot.spec, LocalSpec)
        ]
        if all(wish.spec.gpus is None for wish in wishes):
            return ()
        keep = {**self.placements(slots), **(beside or {})}
        try:
            there = self.accelerator.devices()
        except AcceleratorError as error:
            raise ConfigError([f"which GPUs there are is not known: {error}"]) from None
        devices = visible(there, self._visible)
        try:
            found = place(wishes, devices, keep)
        except PlacementError as error:
            hidden = len(there) - len(devices)
            note = f"{VISIBLE} of the gateway hides {hidden} of {len(there)} GPUs"
            raise ConfigError([*error.faults, note] if hidden else error.faults) from None
        return [
            (slot, found[slot.name])
            for _, engines in slots
            for slot in engines
            if slot.name in found
        ]

    def placements(self, slots: Slots) -> dict[str, Placement]:
        """Return the GPUs of engines that were given some, by name."""
        return {
            slot.name: placement
            for _, engines in slots
            for slot in engines
            if (placement := self._placement(slot)) is not None
        }

    def devices(self) -> Sequence[Device]:
        """Return the GPUs that engines may use; it blocks. Raises AcceleratorError."""
        return visible(self.accelerator.devices(), self._visible)

    def withhold(self, variables: Iterable[str]) -> None:
        """Have engines that start from now on not inherit these variables."""
        self._withheld.update(variables)

    def use(self, placed: Placed) -> None:
        """Give engines that are made from now on these GPUs."""
        self._placed += placed

    @property
    def runs_vllm(self) -> bool:
        """Whether engines are this interpreter's vLLM."""
        return self._launcher is None

    @property
    def accelerator(self) -> Accelerator:
        """Where memory is asked for; looked for when it is asked first, which blocks."""
        if self._accelerator is None:
            self._accelerator = find_accelerator()
        return self._accelerator

    def __call__(self, model: str, slot: Slot) -> Replica:
        """Return an engine that is not started. Raises LauncherMissing."""
        spec = slot.spec
        if isinstance(spec, ProcessSpec):
            engine = ProcessEngine(
                slot.name,
                spec,
                served_name=model,
                run_dir=self._run_dir,
                launcher=self._launcher or vllm_launcher(),
                env=self._env(slot),
                turn=self._turn,
                keep=self._keep,
                media_domains=slot.media_domains,
                withheld=self._withheld,
                gpus=self._gpus(slot),
                accelerator=lambda: self.accelerator,
                mark=config_hash(model, slot),
            )
            return Replica(engine, model, by_priority=spec.by_priority)
        if isinstance(spec, InProcessSpec):
            if self._launcher is None:
                vllm_launcher()  # whether vLLM is there
            hosted = InProcessEngine(
                slot.name,
                spec,
                served_name=model,
                run_dir=self._run_dir,
                env=self._env(slot),
                turn=self._turn,
                media_domains=slot.media_domains,
                withheld=self._withheld,
            )
            return Replica(hosted, model, by_priority=spec.by_priority)
        return Replica(RemoteEngine(slot.name, spec), spec.served_model_name or model)

    def _gpus(self, slot: Slot) -> tuple[int, ...] | None:
        placement = self._placement(slot)
        return placement.devices if placement else None

    def _env(self, slot: Slot) -> Mapping[str, str]:
        placement = self._placement(slot)
        return placement.env if placement else {}

    def _placement(self, slot: Slot) -> Placement | None:
        placements = (placement for one, placement in reversed(self._placed) if one == slot)
        return next(placements, None)
