"""The state of an on-demand model in the loader."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from app.errors import GatewayError
from app.residency.policy import ModelSnapshot, Residency
from app.settings import ModelSettings
from engines.base import Engine, EngineState
from engines.restarts import pause_s
from engines.spec import ManagedSpec, Restart


def _no_streams() -> int:
    return 0


@dataclass(frozen=True, slots=True)
class OnDemandModel:
    """An on-demand model: its settings and engines."""

    settings: ModelSettings
    engines: tuple[Engine, ...]
    # Interrupts the streams that can go on after its next load; returns their number.
    move_streams: Callable[[], int] = _no_streams
    # Its engines are being replaced: requests wait, and nothing is loaded.
    held: bool = False

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def restart(self) -> Restart:
        spec = self.settings.engines[0]
        assert isinstance(spec, ManagedSpec)  # validated by ModelSettings
        return spec.restart


@dataclass(slots=True, eq=False, kw_only=True)
class ModelState:
    """An on-demand model, its residency, its leases and its waiting requests."""

    model: OnDemandModel
    residency: Residency = Residency.UNLOADED
    leases: int = 0
    wanted_since: float | None = None
    load_began: float = 0.0
    loaded_at: float = 0.0
    last_used: float = 0.0
    load_s: float | None = None
    restarts_before: int = 0  # the latest load
    # Grants no more leases, so that it can be unloaded.
    draining: bool = False
    # By an operator.
    unload_requested: bool = False
    # A refused client was told to retry: the model stays wanted without a waiting request.
    retry_expected: bool = False
    # Failed loads and deaths since it last worked, and when a load may be tried again.
    failures: int = 0
    retry_at: float = 0.0
    # Category of a permanent fault, after which requests do not load it; None: no such fault.
    blocked_by: str | None = None
    # Waiting requests with their keys, in order of arrival; None: it keeps its place.
    waiting: dict["LeaseFuture", str | None] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        return any(engine.state is EngineState.READY for engine in self.model.engines)

    @property
    def has_failed(self) -> bool:
        """True if an engine has failed since the load; one that an operator restarts has not."""
        if any(engine.state is EngineState.FAILED for engine in self.model.engines):
            return True
        return self.restarts > self.restarts_before

    @property
    def restarts(self) -> int:
        """Number of restarts of its engines after failures."""
        return sum(engine.restarts for engine in self.model.engines)

    @property
    def available(self) -> bool:
        """True if a request may have a lease now."""
        return self.residency is Residency.LOADED and not self.draining and self.up

    @property
    def need_gib(self) -> float | None:
        """Memory of this machine that its engines need; None: unknown yet."""
        here = (one for one in self.model.engines if not one.capabilities.elsewhere)
        needs = [engine.memory_gib for engine in here]
        known = [need for need in needs if need is not None]
        return sum(known) if len(known) == len(needs) else None

    @property
    def reason(self) -> str | None:
        """Why it could not be loaded, for operators."""
        errors = (f"{e.name}: {e.last_error}" for e in self.model.engines if e.last_error)
        return next(errors, None)

    @property
    def expected_s(self) -> float | None:
        """Expected duration of a load; None: unknown."""
        if self.load_s is not None:
            return self.load_s
        # As measured by an earlier gateway.
        return max((e.load_s for e in self.model.engines if e.load_s is not None), default=None)

    def snapshot(self) -> ModelSnapshot:
        return ModelSnapshot(
            name=self.model.name,
            residency=self.residency,
            need_gib=self.need_gib,
            leases=self.leases,
            waiting=len(self.waiting),
            wanted_since=self.wanted_since,
            load_began=self.load_began,
            loaded_at=self.loaded_at,
            last_used=self.last_used,
            load_s=self.load_s,
            priority=self.model.settings.keep_priority,
            idle_unload_s=self.model.settings.idle_unload_s,
            unload_requested=self.unload_requested,
            held=self.model.held,
        )

    def record_fault(self, now: float) -> float:
        """Record a failed load or a death; return the backoff in seconds.

        Whether a load has worked shows only later: an engine that dies at its first request has
        loaded before, perhaps for minutes. So a load counts as working once the model was loaded
        for `restart.window_s`, or was unloaded alive; a model that dies after that is loaded again
        at once.
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
        """Answer all waiting requests: with an error, or with a lease each."""
        for granted in self.waiting:
            if not granted.done():
                self.leases += error is None
                granted.set_result(error or self)
        self.waiting.clear()
        self.wanted_since = None
        self.retry_expected = False


# Resolved with the state that the request has a lease on, or with the error.
LeaseFuture = asyncio.Future[ModelState | GatewayError]
