"""The memory of configured engines before they load their models, for `check`."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import
    from app.fleet import Builder
    from engines.spec import LocalSpec

# GiB of the KV cache of vLLM's CPU build.
CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"


def engine_memory(spec: "LocalSpec", builder: "Builder") -> Iterator[str]:
    """Yield the lines of the plan of an engine whose model is a directory here."""
    from engines.plan import PlanError, options_of, plan_lines, plan_memory, read_model_files

    model = spec.model_here
    if model is None or not Path(model).expanduser().is_dir():
        return
    try:
        options = options_of(spec.args, _gpu_gib(builder))
        if options.gpu_gib is None and (space := _cpu_cache(spec)) is not None:
            options = replace(options.for_cpu(), cache_bytes=space)
        yield from plan_lines(plan_memory(read_model_files(model), options))
    except PlanError as error:
        yield f"memory is not known: {error}"


def _gpu_gib(builder: "Builder") -> float | None:
    from engines.gpu import AcceleratorError

    try:
        return next((device.total_gib for device in builder.devices()), None)
    except AcceleratorError:
        return None


def _cpu_cache(spec: "LocalSpec") -> int | None:
    """Return the bytes of the KV cache of an engine on a CPU; None if vLLM chooses them."""
    try:
        gib = float(spec.env.get(CPU_CACHE, os.environ.get(CPU_CACHE, "")))
    except ValueError:
        return None
    return int(gib * 2**30) if 0 < gib < 2**20 else None
