"""A model that is loaded on demand, as the keeper knows it, and what it asks of engines."""

import asyncio
from dataclasses import dataclass, field

from app.errors import GatewayError
from app.residency.policy import Residency, Resident
from app.settings import ModelSettings
from engines.base import Engine, EngineState
from engines.restarts import pause_s
from engines.spec import ProcessSpec, Restart


@dataclass(frozen=True, slots=True)
class OnDemand:
    """A model that is loaded on demand."""

    settings: ModelSettings
    engines: tuple[Engine, ...]

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def restart(self) -> Restart:
        spec = self.settings.engines[0]
        assert isinstance(spec, ProcessSpec)  # ModelSettings has seen to it
        return spec.restart


@dataclass(slots=True, eq=False)
class Entry:
    """What the keeper knows of a model."""

    model: OnDemand
    residency: Residency = Residency.UNLOADED
    holds: int = 0
    wanted_since: float | None = None
    load_began: float = 0.0
    loaded_at: float = 0.0
    last_used: float = 0.0
    load_s: float | None = None
    held_back: bool = False
    asked_out: bool = False
    # Somebody who was told to come back wants it as well.
    promised: bool = False
    # Loads that failed and deaths, since it last worked, and until when no load is tried again.
    failures: int = 0
    retry_at: float = 0.0
    # The kind of fault for which no request has it loaded again; None: there is none.
    blocked_by: str | None = None
    # The requests that wait, in the order in which they came.
    waiting: dict["Given", None] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        return any(engine.state is EngineState.READY for engine in self.model.engines)

    @property
    def open(self) -> bool:
        """Whether a request may use it now."""
        return self.residency is Residency.LOADED and not self.held_back and self.up

    @property
    def need_gib(self) -> float | None:
        needs = [engine.memory_gib for engine in self.model.engines]
        known = [need for need in needs if need is not None]
        return sum(known) if len(known) == len(needs) else None

    @property
    def reason(self) -> str | None:
        """Why it could not be loaded, for operators."""
        told = (f"{e.name}: {e.last_error}" for e in self.model.engines if e.last_error)
        return next(told, None)

    @property
    def expected_s(self) -> float | None:
        """How long a load is expected to take; None: not known."""
        if self.load_s is not None:
            return self.load_s
        # As an earlier gateway has measured it.
        return max((e.load_s for e in self.model.engines if e.load_s is not None), default=None)

    def resident(self) -> Resident:
        return Resident(
            self.model.name,
            self.residency,
            self.need_gib,
            self.holds,
            len(self.waiting),
            self.wanted_since,
            self.load_began,
            self.loaded_at,
            self.last_used,
            self.load_s,
            self.model.settings.keep_priority,
            self.model.settings.idle_unload_s,
            self.asked_out,
        )

    def note_fault(self, now: float) -> float:
        """Note that it did not load, or has died; return for how many seconds none is to be tried.

        What a load achieves shows only in time: an engine that dies at its first request has loaded
        before, for minutes perhaps. So it has worked when it was loaded for `restart.window_s`, or
        was unloaded alive; one that has worked is loaded again at once when it dies.
        """
        restart = self.model.restart
        died = self.residency is Residency.LOADED
        if died and now - self.loaded_at >= restart.window_s:
            self.failures = 0
        wait_s = 0.0 if died and not self.failures else pause_s(restart, self.failures)
        self.failures += 1
        self.retry_at = now + wait_s
        return wait_s

    def answer(self, error: GatewayError | None) -> None:
        """Tell all who wait: an error, or that each has a hold."""
        for given in self.waiting:
            if not given.done():
                self.holds += error is None
                given.set_result(error or self)
        self.waiting.clear()
        self.wanted_since = None
        self.promised = False


# What a request that waits is given: the entry that it has a hold on now, or why it has none.
Given = asyncio.Future[Entry | GatewayError]
