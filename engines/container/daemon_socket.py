"""Finds the socket of Docker or Podman on this machine."""

import os
from collections.abc import Mapping
from pathlib import Path

from engines.process import LauncherMissing

DOCKER_HOST = "DOCKER_HOST"
SCHEME = "unix://"
DOCKER = "/var/run/docker.sock"
PODMAN = "/run/podman/podman.sock"


def find_socket(configured: Path | None, environment: Mapping[str, str]) -> Path:
    """Return the socket of the daemon: the configured one, DOCKER_HOST's, or the first that exists.

    Where none exists, Docker's. Raises LauncherMissing.
    """
    if configured is not None:
        return configured.absolute()
    if host := environment.get(DOCKER_HOST):
        if not host.startswith(SCHEME):
            raise LauncherMissing(
                f"{DOCKER_HOST} is {host}, but engines of kind: container need a daemon on this "
                "machine: set containers.socket"
            )
        return Path(host.removeprefix(SCHEME))
    runtime = environment.get("XDG_RUNTIME_DIR")
    own = [f"{runtime}/docker.sock", f"{runtime}/podman/podman.sock"] if runtime else []
    return next(
        (Path(path) for path in (DOCKER, *own, PODMAN) if os.path.exists(path)), Path(DOCKER)
    )
