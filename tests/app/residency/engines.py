"""Engines without processes: they load when a test lets them, in the states of real ones."""

import asyncio
from dataclasses import dataclass, field

from engines.base import EngineState, EngineUnavailable
from engines.lifecycle import Event, after


@dataclass
class FakeEngine:
    """One engine. It loads at once, unless `gate` is closed."""

    name: str
    gib: float = 1.0
    # Whether it tells what it takes before it has run.
    declared: bool = True
    # Why it does not start; None: it does.
    fault: str | None = None
    state: EngineState = EngineState.STOPPED
    last_error: str | None = None
    load_s: float | None = None
    # The kind of fault of a start that fails for good; None: its next one may work.
    lasting: str | None = None
    blocked_by: str | None = None
    starts: int = 0
    unloads: int = 0
    rests: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
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
            raise EngineUnavailable(self.last_error or f"{self.name} is {self.state}")

    async def _start(self) -> None:
        self.starts += 1
        self.state = after(self.state, Event.START)
        await self.gate.wait()
        self.last_error = self.fault
        self.blocked_by = self.lasting if self.fault else None
        self.state = after(self.state, Event.FAIL if self.fault else Event.LOADED)
        self._has_run = self._has_run or not self.fault

    async def rest(self) -> None:
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
        """End as an engine does whose process was killed."""
        self.state = after(self.state, Event.FAIL)
        self.last_error = "it died while serving (killed by SIGKILL)"
