"""An engine that only has the attributes that routing looks at."""

from dataclasses import dataclass, field

from engines.base import EngineFacts, EngineRequest, EngineResponse, EngineState


@dataclass
class FakeEngine:
    """See `engines.base.Engine`; nothing runs."""

    name: str = "demo-0"
    state: EngineState = EngineState.READY
    facts: EngineFacts = field(default_factory=EngineFacts)
    last_error: str | None = None

    def describe(self) -> str:
        return self.name

    async def ensure_ready(self, deadline: float) -> None:
        self.state = EngineState.READY

    async def send(self, request: EngineRequest) -> EngineResponse:
        raise NotImplementedError

    async def drain(self) -> None:
        self.state = EngineState.DRAINING

    async def stop(self, grace: float) -> None:
        self.state = EngineState.STOPPED
