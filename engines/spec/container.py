"""The specification of engines in containers."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from engines.hub import is_repository
from engines.spec.base import PlacedError
from engines.spec.local import LocalSpec

# [REGISTRY[:PORT]/]NAME[:TAG][@DIGEST], as in the specification of the OCI's distribution.
_IMAGE = re.compile(
    r"[a-zA-Z0-9][a-zA-Z0-9._-]*(?::[0-9]{1,5}(?=/))?(?:/[a-z0-9][a-z0-9._-]*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_VOLUME = re.compile(r"(?P<source>[^:]+):(?P<target>/[^:]*)(?::(?P<options>[a-zA-Z,]+))?")
# Where the gateway mounts the directories of the socket and of temporary files.
SOCKET_TARGET = "/run/vllm-gateway"
SCRATCH_TARGET = "/tmp"  # noqa: S108 - a path in the container, mounted for it alone


class ContainerSpec(LocalSpec):
    """A vLLM server in a container of Docker or Podman on this machine, on a Unix socket."""

    kind: Literal["container"]
    image: str = Field(
        description="Image of the container, with a tag or a digest: "
        "vllm/vllm-openai:v0.32.0, registry.example/vllm@sha256:…",
    )
    model: str = Field(
        min_length=1,
        description="Directory of the model in the container (see volumes), or Hugging Face "
        "repository.",
    )
    pull: Literal["never", "missing", "always"] = Field(
        "missing", description="When the image is pulled before a start."
    )
    entrypoint: list[str] | None = Field(
        None,
        min_length=1,
        description="Command that runs `vllm serve` in the container; the flags follow it. "
        "Default: the image's own, which is that of vllm/vllm-openai.",
    )
    volumes: list[str] = Field(
        default_factory=list,
        description="Directories and volumes in the container: SOURCE:TARGET or "
        "SOURCE:TARGET:OPTIONS, as in `docker run --volume`. Weights need :ro only.",
    )
    shm_gib: float = Field(
        2.0, gt=0, description="Size of /dev/shm, which the ranks of an engine share, in GiB."
    )
    user: str | None = Field(
        None,
        pattern=r"^[0-9]{1,10}(:[0-9]{1,10})?$",
        description="User and group in the container, as numbers: 1000:1000. Only a gateway that "
        "runs as root can set another user than its own. Default: the gateway's.",
    )
    read_only: bool = Field(
        True,
        description="Mount the container's root file system read-only. /tmp, which is also HOME, "
        "and volumes stay writable.",
    )
    capabilities: list[str] = Field(
        default_factory=list,
        description="Linux capabilities that the container keeps, such as SYS_NICE. Default: none.",
    )
    network: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
        description="Network of the container: none (enough for weights in a volume), host, or a "
        "network's name. No port is published. Default: the daemon's.",
    )
    replicas: int = Field(1, ge=1, le=64, description="Number of engines of this specification.")
    sleep_level: Literal[1, 2] | None = Field(
        None,
        description="Put the engine to sleep instead of stopping it when it is unloaded (vLLM's "
        "sleep mode, GPU only): 1 keeps the weights in CPU memory, 2 discards them.",
    )

    @field_validator("image")
    @classmethod
    def _image(cls, image: str) -> str:
        if not _IMAGE.fullmatch(image):
            raise ValueError(
                f"must be the reference of an image, such as vllm/vllm-openai:v0.32.0, "
                f"not {image!r}"
            )
        return image

    @field_validator("volumes")
    @classmethod
    def _volumes(cls, volumes: list[str]) -> list[str]:
        for number, volume in enumerate(volumes):
            found = _VOLUME.fullmatch(volume)
            if found is None:
                raise PlacedError("must be SOURCE:TARGET or SOURCE:TARGET:ro", number)
            if found["target"].rstrip("/") in (SOCKET_TARGET, SCRATCH_TARGET):
                raise PlacedError(f"{found['target']} is mounted by the gateway", number)
        return volumes

    @property
    def binds(self) -> list[str]:
        """The volumes with absolute sources, as the daemon takes them."""
        return [
            volume if source is None else f"{source}:{volume.partition(':')[2]}"
            for volume, source in zip(self.volumes, map(_directory, self.volumes), strict=True)
        ]

    @property
    def model_here(self) -> None:
        """None: the directory is one in the container."""

    def path_here(self, path: str) -> str | None:
        """Return where a path in the container is here, by its volumes; None: it is not."""
        for volume, source in zip(self.volumes, map(_directory, self.volumes), strict=True):
            target = volume.split(":")[1].rstrip("/")
            if source is not None and f"{path}/".startswith(f"{target}/"):
                return f"{source}{path[len(target) :]}"
        return None

    def missing_model(self) -> str | None:
        """Return the fault of a volume whose directory does not exist: Docker would make it."""
        for source in map(_directory, self.volumes):
            if source is not None and not source.exists():
                return f"directory {source} of volumes does not exist"
        return None

    def incomplete_model(self) -> None:
        """Return None: what the directory holds is seen in the container."""

    def doubtful_model(self) -> str | None:
        """Return a note where each start may download the model again."""
        if self.volumes or not is_repository(self.model):
            return None
        return (
            f"each start downloads {self.model} again, unless the image has it: keep the cache in "
            "a volume, volumes: [/var/cache/vllm:/cache] and env: {HF_HOME: /cache}"
        )


def _directory(volume: str) -> Path | None:
    """Return the absolute directory of a volume; None for a named volume."""
    source = volume.partition(":")[0]
    return Path(source).expanduser().absolute() if source.startswith((".", "/", "~")) else None
