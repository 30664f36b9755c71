"""The engine of kind `container`: a supervised vLLM server in a container."""

import asyncio
import json
import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from engines.base import EngineCapabilities
from engines.container.host import ContainerHost
from engines.gpu import Accelerator, EngineMemory, HostMemory
from engines.http import Address, Http1Client
from engines.output import redact_command
from engines.process import SOCKET, Launch, LaunchOrigin, SupervisedEngine, server_flags
from engines.spec import SOCKET_TARGET, ContainerSpec


class ContainerEngine(SupervisedEngine):
    """A vLLM server in a container of Docker or Podman on this machine."""

    kind = "container"
    capabilities = EngineCapabilities(managed=True, unloadable=True, can_sleep=True, has_log=True)

    def __init__(
        self,
        name: str,
        spec: ContainerSpec,
        *,
        served_name: str,
        run_dir: Path,
        socket: Path,
        turn: asyncio.Semaphore | None = None,
        keep: bool = False,
        media_domains: Sequence[str] = (),
        withheld: Collection[str] = (),
        gpus: Sequence[int] | None = None,
        accelerator: Callable[[], Accelerator] = HostMemory,
        mark: str | None = None,
        lora: bool = False,
        find_adapter_fault: Callable[[str], str | None] = lambda path: None,
    ) -> None:
        """`socket` is the daemon's; `gpus` are given to the container. Others: `ProcessEngine`."""
        command = server_flags(
            spec,
            served_name=served_name,
            socket=f"{SOCKET_TARGET}/{SOCKET}",
            media_domains=media_domains,
            lora=lora,
        )
        launch = Launch(
            name=name,
            spec=spec,
            served_name=served_name,
            directory=run_dir / name,
            command=tuple(command),
            env={},
            keep=keep,
            withheld=withheld,
            lora=lora,
            origin=None
            if mark is None
            else LaunchOrigin(mark, None if gpus is None else tuple(gpus)),
            place=_settings_of(spec, socket, gpus),
        )
        address = Address(uds=str(launch.socket))
        super().__init__(
            launch,
            ContainerHost(launch, EngineMemory(name, accelerator, gpus), socket, gpus),
            client=Http1Client(address, spec.timeouts),
            control=Http1Client(address, spec.timeouts),
            turn=turn,
            find_adapter_fault=find_adapter_fault,
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
