"""The engine of kind `container`: a supervised vLLM server in a container."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from engines.base import EngineCapabilities
from engines.container.host import ContainerHost
from engines.gpu import EngineMemory
from engines.http import Address, Http1Client
from engines.output import redact_command
from engines.process import SOCKET, Launch, SupervisedEngine, server_flags
from engines.setup import EngineSetup
from engines.spec import SOCKET_TARGET, ContainerSpec


class ContainerEngine(SupervisedEngine):
    """A vLLM server in a container of Docker or Podman on this machine."""

    kind = "container"
    capabilities = EngineCapabilities(managed=True, unloadable=True, can_sleep=True, has_log=True)

    def __init__(self, setup: EngineSetup, spec: ContainerSpec, socket: Path) -> None:
        """`socket` is the daemon's; the GPUs of `setup` are given to the container."""
        flags = server_flags(setup, spec, f"{SOCKET_TARGET}/{SOCKET}")
        launch = Launch.of(setup, spec, flags, place=_settings_of(spec, socket, setup.gpus))
        memory = EngineMemory(setup.name, setup.accelerator, setup.gpus)
        address = Address(uds=str(launch.socket))
        super().__init__(
            launch,
            ContainerHost(launch, memory, socket, setup.gpus),
            client=Http1Client(address, spec.timeouts),
            control=Http1Client(address, spec.timeouts),
            turn=setup.turn,
            find_adapter_fault=setup.find_adapter_fault,
        )

    def describe(self) -> str:
        spec = self._spec
        assert isinstance(spec, ContainerSpec)
        words = [*(spec.entrypoint or ()), *self._launch.command]
        return f"container of {spec.image}: {redact_command(shlex.join(words))}"


def _settings_of(spec: ContainerSpec, socket: Path, gpus: Sequence[int] | None) -> str:
    """Return what a container must have been started with to be adopted, except its command."""
    fields = {"image", "entrypoint", "volumes", "shm_gib", "user", "read_only", "network"}
    chosen = spec.model_dump(mode="json", include=fields | {"capabilities"})
    return json.dumps([str(socket), gpus and list(gpus), chosen], sort_keys=True)
