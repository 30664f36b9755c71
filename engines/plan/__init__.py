"""Plans the memory of an engine before it loads a model, from the model's files alone.

`model_media` says which media it takes.
`model_files` reads headers, `architecture` and `weights` and `kv_cache` compute, `memory_plan` puts
them together, `plan_text` says it in lines.
"""

from engines.plan.adapter import find_adapter_fault
from engines.plan.engine_memory import engine_memory
from engines.plan.faults import PlanError
from engines.plan.kv_cache import CACHE_TYPES
from engines.plan.local_models import LocalModel, local_models
from engines.plan.memory_plan import (
    MemoryPlan,
    PlanOptions,
    options_of,
    plan_memory,
)
from engines.plan.model_files import read_model_files
from engines.plan.model_media import media_of_model
from engines.plan.plan_text import plan_lines

__all__ = [
    "CACHE_TYPES",
    "LocalModel",
    "MemoryPlan",
    "PlanError",
    "PlanOptions",
    "engine_memory",
    "find_adapter_fault",
    "local_models",
    "media_of_model",
    "options_of",
    "plan_lines",
    "plan_memory",
    "read_model_files",
]
