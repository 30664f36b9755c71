"""The section `ray`: the cluster of engines of kind: ray."""

import re

from pydantic import Field, field_validator

from engines.spec import RayTls, SpecModel

_LABEL = r"[A-Za-z0-9_-]{1,63}"
_HOST_PORT = rf"(?:{_LABEL}(?:\.{_LABEL})*\.?|\[[0-9a-fA-F:]+\]):([0-9]{{1,5}})"


class RaySettings(SpecModel):
    """The Ray cluster of engines of kind: ray. Read only where a model has one."""

    address: str = Field(
        "auto",
        description="Address of the cluster: auto (the one that this machine is a node of), "
        "HOST:PORT of its head, or local (a cluster of this machine alone, started and ended with "
        "the gateway).",
    )
    namespace: str = Field(
        "vllm-gateway",
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="Namespace of the engines' actors. Gateways that share a cluster and have "
        "engines of the same name need different namespaces.",
    )

    tls: RayTls | None = Field(
        None,
        description="TLS between the gateway and these engines. Default: plain HTTP.",
    )

    @field_validator("address")
    @classmethod
    def _address(cls, address: str) -> str:
        if address in ("auto", "local"):
            return address
        found = re.fullmatch(_HOST_PORT, address)
        if found is None or not 0 < int(found[1]) < 65536:
            raise ValueError(f"must be auto, local or HOST:PORT of the head, not {address!r}")
        return address
