"""An engine without a process, whose state tests set, and a request's routing hints."""

from collections.abc import Callable
from dataclasses import dataclass, field

from app.routing import ReportedTokens
from app.settings import SlotsPerEngine
from engines.base import (
    Engine,
    EngineCapabilities,
    EngineFacts,
    EngineRequest,
    EngineResponse,
    EngineState,
    Progress,
    Start,
)


class FakeEngine(Engine):
    """An engine that runs nothing. Tests read and write its attributes."""

    kind = "process"
    capabilities = EngineCapabilities(managed=True)
    progress: Progress | None = None
    last_error: str | None = None
    restarts: int = 0
    load_s: float | None = None
    starting: Start | None = None
    blocked_by: str | None = None
    shared_id: str | None = None

    def __init__(
        self, name: str = "demo-0", state: EngineState = EngineState.READY, **attributes: object
    ) -> None:
        super().__init__(name)
        self._status.state = state
        for attribute, value in attributes.items():
            setattr(self, attribute, value)

    @property
    def state(self) -> EngineState:
        return self._status.state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._status.state = state
        self._status.changes.notify()

    @property
    def facts(self) -> EngineFacts:
        return self._status.facts

    @facts.setter
    def facts(self, facts: EngineFacts) -> None:
        self._status.facts = facts

    def describe(self) -> str:
        return self.name

    async def ensure_ready(self, deadline: float) -> None:
        self.state = EngineState.READY

    async def send(self, request: EngineRequest) -> EngineResponse:
        raise NotImplementedError

    async def exposition(self) -> bytes:
        raise NotImplementedError

    async def drain(self) -> None:
        self.state = EngineState.DRAINING

    async def stop(self, grace: float) -> None:
        self.state = EngineState.STOPPED


@dataclass
class FakeHints:
    """See `app.routing.policies.RoutingHints`."""

    session_key: bytes = b""
    text: bytes = b""
    slots: SlotsPerEngine | None = field(default=None, kw_only=True)
    uncached_tokens: int = field(default=0, init=False)
    on_end: Callable[[ReportedTokens | None], None] | None = field(default=None, init=False)

    def session(self) -> bytes:
        return self.session_key

    def prompt(self, most: int) -> bytes:
        return self.text[:most]
