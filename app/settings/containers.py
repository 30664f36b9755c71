"""The section `containers`: the daemon of engines of kind: container."""

from pathlib import Path

from pydantic import Field, field_validator

from engines.spec import SpecModel


class ContainersSettings(SpecModel):
    """The daemon of engines of kind: container. Used only where a model has one."""

    socket: Path | None = Field(
        None,
        description="Unix socket of Docker or Podman; whoever may use it is root on this machine. "
        "Default: that of DOCKER_HOST, else /var/run/docker.sock, the sockets of the user's own "
        "Docker or Podman, or /run/podman/podman.sock, whichever exists first.",
    )

    @field_validator("socket", mode="before")
    @classmethod
    def _path(cls, socket: object) -> object:
        """Accept the form of DOCKER_HOST, too."""
        return socket.removeprefix("unix://") if isinstance(socket, str) else socket
