"""A general plugin of vLLM, loaded by each of its processes: replaces busy waiting on CPUs.

On a CPU, EngineCore and its worker communicate through shared memory, and the reader polls with
`os.sched_yield()` for up to a second after the last message (vLLM 0.32, `shm_broadcast.py`). When
tasks yield in a tight loop, Linux's EEVDF scheduler (6.6 and later) may starve other tasks for
seconds, a fault that it has had several times. Short sleeps avoid that at the same throughput:
docs/decisions/0026-polling.md has the figures.

Only processes of managed engines are changed, and only on vLLM's CPU platform: a single GPU's
worker shares EngineCore's process, and machines with several GPUs have cores to spin on.
"""

import logging
import os
import time

from engines.guard.process_tree import MARKER_VARIABLE

# A step of the smallest model takes 2 ms, and the kernel adds 50 us. At 10 us the polling itself
# used up the cores; 300 us cost 15 % of the throughput at 8 streams.
POLL_S = 0.0001


def register() -> None:
    """Replace vLLM's spinning by sleeping in this process, where that applies."""
    if MARKER_VARIABLE not in os.environ:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import shm_broadcast

    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = pause
        # Below "vllm", whose log this process writes.
        logging.getLogger("vllm.vllm_gateway").info(
            "polls shared memory with sleeps instead of spinning"
        )


def pause() -> None:
    """Wait for the interval between two polls of shared memory. Blocks."""
    time.sleep(POLL_S)
