"""The specification of an engine in the configuration: validated once, then frozen."""

from typing import Annotated

from pydantic import Field

from engines.spec.base import PlacedError, Restart, SpecModel, Timeouts
from engines.spec.container import SCRATCH_TARGET, SOCKET_TARGET, ContainerSpec
from engines.spec.local import (
    CACHED_TOKENS_FLAG,
    LORA_ENV,
    LORA_FLAG,
    LORA_MODULES_FLAG,
    MAX_ADAPTERS,
    MAX_ADAPTERS_FLAG,
    RESERVED_FLAGS,
    FlagValue,
    InProcessSpec,
    LocalSpec,
    ManagedSpec,
    ProcessSpec,
    flag_name,
)
from engines.spec.old_flags import explain_removed_flag, nearest_flag
from engines.spec.ray import HOST_IP, REPLICA_FORMS, RaySpec, RayTls, ReplicaRange
from engines.spec.remote import (
    Discovery,
    EndpointSlices,
    RemoteSpec,
    check_url,
    find_variable_fault,
)
from engines.spec.several_nodes import EXECUTOR_FLAG, WORLD_FLAGS, parallel_size

EngineSpec = Annotated[
    ProcessSpec | InProcessSpec | ContainerSpec | RaySpec | RemoteSpec,
    Field(discriminator="kind"),
]

__all__ = [
    "CACHED_TOKENS_FLAG",
    "EXECUTOR_FLAG",
    "HOST_IP",
    "LORA_ENV",
    "LORA_FLAG",
    "LORA_MODULES_FLAG",
    "MAX_ADAPTERS",
    "MAX_ADAPTERS_FLAG",
    "REPLICA_FORMS",
    "RESERVED_FLAGS",
    "SCRATCH_TARGET",
    "SOCKET_TARGET",
    "WORLD_FLAGS",
    "ContainerSpec",
    "Discovery",
    "EndpointSlices",
    "EngineSpec",
    "FlagValue",
    "InProcessSpec",
    "LocalSpec",
    "ManagedSpec",
    "PlacedError",
    "ProcessSpec",
    "RaySpec",
    "RayTls",
    "RemoteSpec",
    "ReplicaRange",
    "Restart",
    "SpecModel",
    "Timeouts",
    "check_url",
    "explain_removed_flag",
    "find_variable_fault",
    "flag_name",
    "nearest_flag",
    "parallel_size",
]
