"""A fake engine with the attributes that routing reads, and fake hints of a request."""

from dataclasses import dataclass, field

from engines.base import EngineFacts, EngineRequest, EngineResponse, EngineState, Progress, Start


@dataclass
class FakeEngine:
    """An `engines.base.Engine` that runs nothing."""

    name: str = "demo-0"
    state: EngineState = EngineState.READY
    facts: EngineFacts = field(default_factory=EngineFacts)
    progress: Progress | None = None
    last_error: str | None = None
    restarts: int = 0
    load_s: float | None = None
    starting: Start | None = None
    blocked_by: str | None = None

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

    def session(self) -> bytes:
        return self.session_key

    def prompt(self, most: int) -> bytes:
        return self.text[:most]
