"""Fake engines with real states, which load when a test lets them."""

import asyncio

from engines.base import EngineCapabilities, EngineNotReady, EngineState
from engines.lifecycle import Event, after
from tests.app.routing import fakes


class FakeEngine(fakes.FakeEngine):
    """An engine that loads at once, unless `gate` is closed."""

    capabilities = EngineCapabilities(managed=True, unloadable=True)

    def __init__(
        self,
        name: str,
        *,
        gib: float = 1.0,
        declared: bool = True,
        fault: str | None = None,
        lasting: str | None = None,
        state: EngineState = EngineState.STOPPED,
        **attributes: object,
    ) -> None:
        """`declared`: its memory is known before it has run. `fault`: why it does not start.

        `lasting` is the kind of a fault that no restart mends.
        """
        super().__init__(name, state, **attributes)
        self.gib, self.declared, self.fault, self.lasting = gib, declared, fault, lasting
        self.starts = self.unloads = self.rests = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._has_run = False
        self._starting: asyncio.Task[None] | None = None

    @property
    def memory_gib(self) -> float | None:
        return self.gib if self.declared or self._has_run else None

    async def ensure_ready(self, deadline: float) -> None:
        if self.state is not EngineState.READY:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start())
            async with asyncio.timeout_at(None if deadline == float("inf") else deadline):
                await asyncio.shield(self._starting)
        if self.state is not EngineState.READY:
            raise EngineNotReady(self.last_error or f"{self.name} is {self.state}")

    async def _start(self) -> None:
        self.starts += 1
        self.state = after(self.state, Event.START)
        await self.gate.wait()
        self.last_error = self.fault
        self.blocked_by = self.lasting if self.fault else None
        self.state = after(self.state, Event.FAIL if self.fault else Event.LOADED)
        self._has_run = self._has_run or not self.fault

    async def clear_failed(self) -> None:
        assert self.state is EngineState.FAILED
        self.rests += 1

    async def unload(self) -> None:
        self.unloads += 1
        if self.state is EngineState.FAILED:
            self.state = after(self.state, Event.STOP)
        if self.state is EngineState.READY:
            self.state = after(self.state, Event.STOP)
            await asyncio.sleep(0)
            self.state = after(self.state, Event.EXIT)

    def die(self) -> None:
        """Fail as an engine whose process was killed."""
        self.state = after(self.state, Event.FAIL)
        self.last_error = "it died while serving (killed by SIGKILL)"
