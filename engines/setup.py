"""What the gateway decides about an engine that it runs; what users decide is in its spec."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engines.gpu import Accelerator, HostMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Everything that any kind of engine is built from, apart from its spec."""

    name: str
    # The model's name on its server.
    served_name: str
    run_dir: Path
    # Override the gateway's variables, and the spec's override these: its GPUs.
    env: Mapping[str, str] = field(default_factory=dict)
    # Variables that it does not inherit; a reload may add some.
    withheld: Collection[str] = ()
    # Held while it loads.
    turn: asyncio.Semaphore | None = None
    # It outlives the gateway.
    keep: bool = False
    # Media are fetched from these only.
    media_domains: Sequence[str] = ()
    # By which the next gateway identifies its configuration.
    mark: str | None = None
    # The GPUs that the gateway assigned to it; None: none, so it may use all.
    gpus: tuple[int, ...] | None = None
    # Reads the memory of GPUs, and may block.
    accelerator: Callable[[], Accelerator] = HostMemory
    # It takes LoRA adapters.
    lora: bool = False
    # Returns why an adapter cannot be loaded from a path, and may block.
    find_adapter_fault: Callable[[str], str | None] = lambda path: None

    @property
    def directory(self) -> Path:
        """The engine's own part of the run directory."""
        return self.run_dir / self.name
