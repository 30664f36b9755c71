"""Engines of kind `container`: vLLM servers in containers of Docker or Podman.

`engine` implements the interface, `host` is the daemon as the place of an engine, `request` has
what the daemon is asked for, `daemon_socket` finds its socket, and `image_check` looks for images
before a start. The guardian's child
`engines/guard/container_run.py` runs the container.
"""

from engines.container.daemon_socket import find_socket
from engines.container.engine import ContainerEngine
from engines.container.image_check import missing_image
from engines.guard.docker_api import DaemonError

__all__ = ["ContainerEngine", "DaemonError", "find_socket", "missing_image"]
