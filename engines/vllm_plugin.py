"""What changes inside vLLM's own processes: a general plugin of vLLM, loaded by each of them.

On a CPU, EngineCore and its worker talk through shared memory, and who waits there polls with
`os.sched_yield()` for up to a second after the last message (vLLM 0.32, `shm_broadcast.py`). Where
tasks yield in a tight loop, Linux's EEVDF scheduler (6.6 and later) may keep everybody else waiting
for seconds; its own history knows several such faults. With short sleeps instead nobody waits, and
as many tokens come: docs/decisions/0026-polling.md has the figures.

Only processes of engines that a gateway runs are changed, and only on vLLM's CPU platform: a single
GPU's worker shares EngineCore's process, and where there are several there are cores to spin on.
"""

import logging
import os
import time

from engines.guard.process_tree import MARKER_VARIABLE

# A step of the smallest model takes 2 ms, and the kernel adds 50 us of its own. At 10 us the
# waiting itself took the cores; 300 us cost 15 % of the tokens at 8 streams.
POLL_S = 0.0001


def register() -> None:
    """Have this process of vLLM sleep where it would spin; do nothing where that is not wanted."""
    if MARKER_VARIABLE not in os.environ:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import shm_broadcast

    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = pause
        # Below "vllm", whose log this process writes.
        logging.getLogger("vllm.vllm_gateway").info("waits for its peer in sleeps, not in a spin")


def pause() -> None:
    """Wait as long as is worth while between two looks at shared memory. Blocks."""
    time.sleep(POLL_S)
