"""The memory of one engine: how much it uses, and whether it is released after its end."""

import asyncio
import logging
from collections.abc import Callable, Collection

from engines.gpu.accelerator import (
    NO_USAGE,
    Accelerator,
    AcceleratorError,
    Usage,
    wait_until_released,
)
from engines.logs import EngineLogger

log = logging.getLogger(__name__)

# A driver frees the memory of a dead process within a second or two; some drivers take longer.
RELEASE_TIMEOUT_S = 30.0


class EngineMemory:
    """Measures the memory of one engine, off the event loop."""

    def __init__(
        self, name: str, find_accelerator: Callable[[], Accelerator], gpus: Collection[int] | None
    ) -> None:
        """`find_accelerator` may block; `gpus` are those of the engine, None: all."""
        self._name = name
        self._logger = EngineLogger(log, name)
        self._find_accelerator = find_accelerator
        self._gpus = gpus
        # The usage before its processes were started; unknown for an engine that was taken over.
        self._before = NO_USAGE

    async def record_baseline(self) -> None:
        """Record the usage by others; to be called right before the engine is started."""

        def usage() -> Usage:
            return self._find_accelerator().usage(self._gpus)

        try:
            self._before = await asyncio.to_thread(usage)
        except AcceleratorError as error:
            self._logger.warning(": cannot measure the usage of its GPUs: %s", error)
            self._before = NO_USAGE

    async def used_gib(self, pids: Collection[int]) -> float | None:
        """Return the GiB that these processes of the engine use, None where that is unknown."""

        def used() -> float | None:
            return self._find_accelerator().used_gib(pids)

        try:
            return await asyncio.to_thread(used)
        except AcceleratorError:
            return None

    async def wait_until_released(self, pids: Collection[int]) -> None:
        """Wait until the ended processes have released their memory; log what they have not."""
        accelerator = await asyncio.to_thread(self._find_accelerator)
        left = await wait_until_released(
            accelerator, pids, self._before, gpus=self._gpus, timeout_s=RELEASE_TIMEOUT_S
        )
        if left:
            self._logger.error(
                ": its processes have ended, but %.1f GiB are not released after %g s; "
                "its next start may find too little memory",
                left,
                RELEASE_TIMEOUT_S,
            )
