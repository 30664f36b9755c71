"""Whether the daemon has the image of an engine that may not pull it."""

from http import HTTPStatus
from pathlib import Path

from engines.guard.docker_api import ApiError, DockerApi
from engines.spec import ContainerSpec


def missing_image(spec: ContainerSpec, socket: Path) -> str | None:
    """Return the fault of an image that is not here and not pulled. Blocks. Raises DaemonError."""
    api = DockerApi(str(socket))
    try:
        api.call("GET", f"/images/{spec.image}/json")
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        if spec.pull == "never":
            return f"image {spec.image} is not on this machine, and pull is never"
    return None
