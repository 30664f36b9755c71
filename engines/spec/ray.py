"""The specification of engines that run on the nodes of a Ray cluster."""

import re
import ssl
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from engines.spec.base import PlacedError, SpecModel
from engines.spec.local import ManagedSpec
from engines.spec.several_nodes import flag_fault, nodes_fault

# The address of a node for vLLM's own processes.
HOST_IP = "VLLM_HOST_IP"


def _gpus(value: object) -> object:
    """Report in one line what a union of types reports in one line per type."""
    if value in (None, "auto") or (type(value) is int and value >= 1):
        return value
    shown = f", not {value!r}" if isinstance(value, int | str) else ": Ray chooses the devices"
    raise ValueError(f"must be auto or a number of GPUs{shown}")


class ReplicaRange(SpecModel):
    """Engines of one specification that are started and stopped as the load asks for."""

    min: int = Field(1, ge=1, le=64, description="Least number of engines.")
    max: int = Field(ge=1, le=64, description="Greatest number of engines.")
    target_wait_s: float = Field(
        5.0,
        gt=0,
        description="Time in the model's queue, in seconds, above which engines are added.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise PlacedError(f"must be at least min ({self.min})", "max")
        return self


# What pydantic calls the forms of `replicas` in the place of a fault.
REPLICA_FORMS = (("number",), ("range",))


def _form(value: object) -> str:
    return "range" if isinstance(value, dict | ReplicaRange) else "number"


class RayTls(SpecModel):
    """TLS between the gateway and engines of kind: ray."""

    cert_file: str = Field(
        pattern=r"^/",
        description="PEM file with the certificate of a node, on every node at this absolute path. "
        "It names the node's address by Ray as an IP address.",
    )
    key_file: str = Field(
        pattern=r"^/",
        description="PEM file with the private key of cert_file, on every node at this absolute "
        "path.",
    )
    ca_file: Path = Field(
        description="PEM file on the gateway's machine with the authorities that may have signed "
        "cert_file. No others are accepted."
    )

    @field_validator("ca_file")
    @classmethod
    def _authorities(cls, file: Path) -> Path:
        try:
            ssl.create_default_context(cafile=file)
        except ssl.SSLError:
            raise ValueError(f"has no certificate: {file}") from None
        except OSError as error:
            raise ValueError(f"cannot be read: {file}: {error.strerror}") from None
        return file

    def context(self) -> ssl.SSLContext:
        """Return what verifies the certificates of engines. Raises OSError."""
        return ssl.create_default_context(cafile=self.ca_file)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of vLLM that name the files of a node."""
        return f"--ssl-certfile={self.cert_file}", f"--ssl-keyfile={self.key_file}"


class RaySpec(ManagedSpec):
    """A vLLM server on a node of the Ray cluster of the section `ray`."""

    # vLLM's sleep mode needs development routes, which are not opened on a network.
    sleep_level: ClassVar[None] = None

    kind: Literal["ray"]
    replicas: Annotated[
        Annotated[int, Field(ge=1, le=64), Tag("number")] | Annotated[ReplicaRange, Tag("range")],
        Discriminator(_form),
    ] = Field(
        1,
        description="Number of engines of this specification, or its bounds: min, max and "
        "target_wait_s.",
    )
    inherit_env: list[str] = Field(
        default_factory=list,
        description="Further environment variables that the engine inherits from its node: names, "
        "or prefixes such as AWS_*. Default: only those that vLLM and its libraries read, and no "
        "secret except tokens for model downloads (HF_TOKEN).",
    )
    nodes: int = Field(
        1,
        ge=1,
        le=64,
        description="Nodes of one engine, each with its own gpus, resources and accelerator_type. "
        "vLLM's ranks, by its parallel sizes, divide evenly among them.",
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        description="Memory of one engine in GiB, for reports; it counts against no budget. "
        "Default: the highest memory use measured while it ran.",
    )
    gpus: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1)] | None, BeforeValidator(_gpus)
    ] = Field(
        None,
        description="GPUs of one engine on each of its nodes: auto (as many as its parallel sizes "
        "need) or a number. Default: none.",
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="Resources of one engine on each of its nodes by Ray's names: CPU, GPU, memory "
        "(bytes), your own. Default: CPU: 1.",
    )
    accelerator_type: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Type of the GPUs of its nodes by Ray's name, such as A100. Default: any.",
    )

    @field_validator("model")
    @classmethod
    def _same_on_every_node(cls, model: str) -> str:
        """Return an absolute path for a directory here, as vLLM reads it where it runs."""
        if Path(model).is_dir():
            return str(Path(model).absolute())
        if model.startswith(("./", "../")):
            raise ValueError("must be an absolute path on the nodes, or a repository")
        return model

    @field_validator("resources")
    @classmethod
    def _resource_names(cls, resources: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        for name in resources:
            if name == "GPU" and info.data.get("gpus") is not None:
                raise PlacedError("is set by gpus", name)
            if not re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", name):
                raise PlacedError("cannot be the name of a resource", name)
        return resources

    @model_validator(mode="after")
    def _nodes(self) -> Self:
        for name, value in self.args.items():
            if (fault := flag_fault(name, value, self.nodes)) is not None:
                raise PlacedError(fault, "args", name)
        if self.nodes > 1 and HOST_IP in self.env:
            raise PlacedError("is set by the gateway, on each node", "env", HOST_IP)
        try:
            fault = nodes_fault(self.nodes, self.args, self.gpus)
        except ValueError as error:
            fault = str(error)
        if fault is not None:
            raise PlacedError(fault, "nodes")
        return self

    @property
    def model_path(self) -> str | None:
        """The model's directory on the nodes; None: it may be a repository."""
        return self.model if self.model.startswith(("/", "~")) else None
