"""An engine that died under a request, or refuses it, until its supervisor has noticed."""

import asyncio

from engines.base import Engine, EngineState

# Where only the core of a vLLM server dies, the server ends itself within seconds.
NOTICE_S = 10.0


class LostEngine:
    """An engine whose connection broke or was refused, as far as its supervisor has noticed.

    A request must not be sent to it again before: the connection breaks sooner than the supervisor
    sees the process end.
    """

    __slots__ = ("_engine", "_noticed_by", "_ready_since")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ready_since = engine.since if engine.state is EngineState.READY else None
        self._noticed_by = asyncio.get_running_loop().time() + NOTICE_S

    @property
    def unnoticed(self) -> bool:
        """True while the engine counts as READY, as it did when its connection broke."""
        ready = self._engine.state is EngineState.READY
        return ready and self._engine.since == self._ready_since

    @property
    def overdue(self) -> bool:
        """True if the engine goes on after all: it broke the connection for another reason."""
        return self.unnoticed and asyncio.get_running_loop().time() >= self._noticed_by
