"""The container that the daemon is asked for. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from engines.guard.containers import LABEL
from engines.spec import SCRATCH_TARGET, SOCKET_TARGET, ContainerSpec

# Readable in `docker ps`; the container is found by `LABEL`.
ENGINE_LABEL = "vllm-gateway.name"
GIB = 1024**3
# The daemon keeps this much of the output, which the guardian copies.
LOG_OPTIONS = {"max-size": "16m"}


@dataclass(frozen=True, slots=True)
class Daemon:
    """What a daemon is."""

    # It gives GPUs by CDI (Container Device Interface) only.
    podman: bool
    # It runs as a user, who is root in its containers.
    rootless: bool

    @classmethod
    def of(cls, info: Mapping[str, Any], *, podman: bool) -> Self:
        """Return what GET /info says, of Podman or Docker."""
        options = info.get("SecurityOptions") or ()
        return cls(podman, any("name=rootless" in option for option in options))


def default_user(daemon: Daemon, uid: int, gid: int) -> str:
    """Return the user in the container that is the gateway's user outside of it."""
    return "0:0" if daemon.rootless else f"{uid}:{gid}"


def create_request(
    spec: ContainerSpec,
    daemon: Daemon,
    *,
    name: str,
    label: str,
    command: Sequence[str],
    env: Mapping[str, str],
    user: str,
    socket_directory: Path,
    scratch: Path,
    gpus: Sequence[int] | None,
) -> dict[str, Any]:
    """Return the body of POST /containers/create."""
    # HOME of the image may not be writable, and `user` need not have a name.
    variables = {"HOME": SCRATCH_TARGET, "USER": "vllm", **env}
    host: dict[str, Any] = {
        "Binds": [
            f"{socket_directory}:{SOCKET_TARGET}:Z",
            f"{scratch}:{SCRATCH_TARGET}:Z",
            *spec.binds,
        ],
        "CapDrop": ["ALL"],
        "CapAdd": spec.capabilities,
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": spec.read_only,
        "ShmSize": int(spec.shm_gib * GIB),
        "LogConfig": {"Type": "json-file", "Config": LOG_OPTIONS},
        **_devices(daemon, gpus),
    }
    if spec.network is not None:
        host["NetworkMode"] = spec.network
    body: dict[str, Any] = {
        "Image": spec.image,
        "Cmd": list(command),
        "Env": [f"{key}={value}" for key, value in variables.items()],
        "User": user,
        "Labels": {LABEL: label, ENGINE_LABEL: name},
        "HostConfig": host,
    }
    if spec.entrypoint is not None:
        body["Entrypoint"] = spec.entrypoint
    return body


def _devices(daemon: Daemon, gpus: Sequence[int] | None) -> dict[str, Any]:
    """Return the part of HostConfig that gives a container these GPUs, and no others."""
    if not gpus:
        return {}
    if daemon.podman:
        return {
            "Devices": [
                {
                    "PathOnHost": f"nvidia.com/gpu={gpu}",
                    "PathInContainer": "",
                    "CgroupPermissions": "",
                }
                for gpu in gpus
            ]
        }
    ids = [str(gpu) for gpu in gpus]
    return {"DeviceRequests": [{"DeviceIDs": ids, "Capabilities": [["gpu"]]}]}
