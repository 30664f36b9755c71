"""The memory of one engine: what it takes, and whether all of it is free again after its end."""

import asyncio
import logging
from collections.abc import Callable, Collection

from engines.gpu.accelerator import NO_USAGE, Accelerator, AcceleratorError, Usage, until_released

log = logging.getLogger(__name__)

# A driver frees the memory of a dead process within a second or two; some drivers take longer.
RELEASE_S = 30.0


class EngineMemory:
    """Asks the accelerator about one engine, off the event loop."""

    def __init__(
        self, name: str, find: Callable[[], Accelerator], gpus: Collection[int] | None
    ) -> None:
        """`find` returns the accelerator and may block; `gpus` are the engine's, None: all."""
        self._name = name
        self._find = find
        self._gpus = gpus
        # From before its processes were started; nothing is known of an engine that is taken over.
        self._before = NO_USAGE

    async def note_before(self) -> None:
        """Note what others hold, right before the engine is started."""

        def usage() -> Usage:
            return self._find().usage(self._gpus)

        try:
            self._before = await asyncio.to_thread(usage)
        except AcceleratorError as error:
            log.warning(
                "engine %s: what its GPUs hold is not known: %s",
                self._name,
                error,
                extra={"engine": self._name},
            )
            self._before = NO_USAGE

    async def held_gib(self, pids: Collection[int]) -> float | None:
        """Return what these processes of the engine hold, None where nobody knows."""

        def held() -> float | None:
            return self._find().held_gib(pids)

        try:
            return await asyncio.to_thread(held)
        except AcceleratorError:
            return None

    async def until_free(self, pids: Collection[int]) -> None:
        """Return when what the ended processes held is free; what is not is told in the log."""
        accelerator = await asyncio.to_thread(self._find)
        left = await until_released(
            accelerator, pids, self._before, gpus=self._gpus, timeout_s=RELEASE_S
        )
        if left:
            log.error(
                "engine %s: its processes have ended, and %.1f GiB are still held after %g s; "
                "its next start may find too little memory",
                *(self._name, left, RELEASE_S),
                extra={"engine": self._name},
            )
