"""A general plugin of vLLM, loaded by each of its processes: quicker starts, repairs on CPUs.

**Garbage.** While it loads a model, a process of vLLM collects garbage in full half a dozen times,
and looks at all that it has imported: 1.2 s of CPU in EngineCore of a small model. Here what there
is before that is set aside, as vLLM itself does once it has started, and until it ends.

**Polling.** On a CPU, EngineCore and its worker communicate through shared memory, and the reader
polls with `os.sched_yield()` for up to a second after the last message (vLLM 0.32,
`shm_broadcast.py`). When tasks yield in a tight loop, Linux's EEVDF scheduler (6.6 and later) may
starve other tasks for seconds, a fault that it has had several times. Short sleeps avoid that at
the same throughput: docs/decisions/0026-polling.md has the figures.

**Seeds.** A prompt that does not fit into one step is computed in parts, and the token that is
sampled after each part but the last is thrown away. For a request with a seed, vLLM 0.32 then turns
its generator back with `set_offset()` (`gpu_model_runner.py`), which CPU generators do not have:
EngineCore dies, with every request in it. Here those samples do not use the request's generator at
all, so that the seed means the same however the prompt was divided.

**Forks.** vLLM 0.32 has every process of a CPU engine spawned (`platforms/cpu.py`), whatever
VLLM_WORKER_MULTIPROC_METHOD says, and each imports all modules again: half of the start of a small
model. Here `fork` in the engine's environment is heeded, as on GPUs. It is for one thread in each
process (OMP_NUM_THREADS=1): OpenMP's threads do not survive a fork, and what vLLM preloads for many
of them needs a new program.

Only processes of managed engines are changed, and but for garbage only on vLLM's CPU platform: a
single GPU's worker shares EngineCore's process, and machines with several GPUs have cores to spin
on.
"""

import gc
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# As in engines.guard.process_tree, which other environments do not have.
MARKER_VARIABLE = "ENGINE_OF_GATEWAY"
# A step of the smallest model takes 2 ms, and the kernel adds 50 us. At 10 us the polling itself
# used up the cores; 300 us cost 15 % of the throughput at 8 streams.
POLL_S = 0.0001
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"

_heeds_fork = False  # in a forked process as in its parent


def register() -> None:
    """Apply the changes to this process, where they apply."""
    if MARKER_VARIABLE not in os.environ:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        repair(current_platform)
    if multiprocessing.parent_process() is not None:
        gc.freeze()


def repair(platform: Any) -> None:
    """Apply the repairs for CPUs to this process."""
    # Below "vllm", whose log this process writes.
    log = logging.getLogger("vllm.vllm_gateway")
    from vllm.distributed.device_communicators import shm_broadcast

    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = pause
        log.info("polls shared memory with sleeps instead of spinning")
    if os.environ.get(METHOD) == "fork" and not _heeds_fork:
        heed_fork(platform)
    # The API server has no model; importing the runner would cost it a second.
    if multiprocessing.parent_process() is not None:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        CPUModelRunner.sample_tokens = sparing_generators(CPUModelRunner.sample_tokens)
        log.info("keeps generators of seeds from samples that are thrown away")


def heed_fork(platform: Any) -> None:
    """Have processes of a CPU engine forked, although its platform sets `spawn`."""
    global _heeds_fork
    _heeds_fork = True
    update = platform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        update(config)
        os.environ[METHOD] = "fork"

    platform.check_and_update_config = check_and_update_config
    os.register_at_fork(after_in_child=_begin_anew)


def _begin_anew() -> None:
    """Undo in a forked process what its parent did and a spawned one would not inherit."""
    from vllm import plugins

    signal.set_wakeup_fd(-1)  # that of the parent's event loop
    plugins.plugins_loaded = False  # each process loads them


def pause() -> None:
    """Wait for the interval between two polls of shared memory. Blocks."""
    time.sleep(POLL_S)


def sparing_generators(sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model runner's `sample_tokens` that draws no discarded sample from a seed."""

    def sample(runner: Any, *args: Any, **kwargs: Any) -> Any:
        with _hidden_generators(runner):
            return sample_tokens(runner, *args, **kwargs)

    return sample


@contextmanager
def _hidden_generators(runner: Any) -> Iterator[None]:
    # Keyed by row; the sampler reads this very dictionary.
    generators: dict[int, object] = runner.input_batch.generators
    discarded = runner.discard_request_mask.np
    hidden = {row: generators.pop(row) for row in list(generators) if discarded[row]}
    try:
        yield
    finally:
        generators.update(hidden)
