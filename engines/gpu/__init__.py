"""GPUs and memory: what there is, what engines use, and which GPUs each engine gets.

`accelerator` measures memory through NVML or /proc, `engine_memory` that of one engine.
`host_memory` describes the host, `placement` assigns GPUs to engines, `assumed_gpus` stands for the
GPUs of another machine.
"""

from engines.gpu.accelerator import (
    Accelerator,
    AcceleratorError,
    Device,
    HostMemory,
    find_accelerator,
)
from engines.gpu.assumed_gpus import AssumedGpus
from engines.gpu.engine_memory import EngineMemory
from engines.gpu.host_memory import available_host_gib, count_memory_nodes
from engines.gpu.placement import (
    VISIBLE_DEVICES,
    Placement,
    PlacementError,
    PlacementRequest,
    count_gpus,
    memory_share,
    place,
    place_additional,
    visible_devices,
)

__all__ = [
    "VISIBLE_DEVICES",
    "Accelerator",
    "AcceleratorError",
    "AssumedGpus",
    "Device",
    "EngineMemory",
    "HostMemory",
    "Placement",
    "PlacementError",
    "PlacementRequest",
    "available_host_gib",
    "count_gpus",
    "count_memory_nodes",
    "find_accelerator",
    "memory_share",
    "place",
    "place_additional",
    "visible_devices",
]
