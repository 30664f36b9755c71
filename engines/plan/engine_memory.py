"""The plan of a configured engine's memory, in lines, before it loads its model."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from engines.plan.faults import PlanError
from engines.plan.memory_plan import options_of, plan_memory
from engines.plan.model_files import read_model_files
from engines.plan.plan_text import plan_lines
from engines.spec import LocalSpec

# GiB of the KV cache of vLLM's CPU build.
CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"


def engine_memory(
    spec: LocalSpec, gpu_gib: Callable[[], float | None], on_cpu: Callable[[], bool]
) -> Iterator[str]:
    """Yield the lines of the plan of an engine whose model is a directory here.

    `gpu_gib` returns the memory of a GPU; None: there is none, or it is not known. `on_cpu` returns
    whether vLLM is its CPU build. Blocks: it reads the headers of the model's files.
    """
    model = spec.model_here
    if model is None or not Path(model).expanduser().is_dir():
        return
    try:
        options = options_of(spec.args, gpu_gib())
        if options.gpu_gib is None and (space := _cpu_cache(spec)) is not None:
            options = replace(options.for_cpu(), cache_bytes=space)  # before the flag: vLLM 0.32
        elif options.gpu_gib is None and options.cache_bytes is not None and on_cpu():
            options = options.for_cpu()
        yield from plan_lines(plan_memory(read_model_files(model), options))
    except PlanError as error:
        yield f"memory is not known: {error}"


def _cpu_cache(spec: LocalSpec) -> int | None:
    """Return the bytes of the KV cache of an engine on a CPU; None if vLLM chooses them."""
    try:
        gib = float(spec.env.get(CPU_CACHE, os.environ.get(CPU_CACHE, "")))
    except ValueError:
        return None
    return int(gib * 2**30) if 0 < gib < 2**20 else None
