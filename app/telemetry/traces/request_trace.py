"""What is noted of one request for its trace while it is under way. Nothing of OpenTelemetry.

The relay notes moments; spans are made of them once the request has ended (`tracing.py`). Only what
an engine is told exists before: the ids in its `traceparent`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, time_ns
from typing import TYPE_CHECKING

from app.settings import ConfigError, TracesSettings
from engines.base import EngineError

if TYPE_CHECKING:  # OpenTelemetry is imported only where traces go somewhere
    from app.telemetry.traces.tracer import Tracer

SAMPLED = 1
LONGEST_METHOD = 16


@dataclass(slots=True)
class Phase:
    """A part of a request; moments are perf_counter's. `end` is None for one that did not end."""

    name: str
    start: float
    end: float | None = None
    # The kind of fault in which it ended, where another model was tried after it.
    fault: str | None = None


@dataclass(slots=True)
class Attempt:
    """One engine that was asked, the phase of a request that an engine's own spans belong to."""

    span_id: int
    start: float
    engine: str | None = None
    end: float | None = None
    # The kind of fault with which it failed, where another engine was asked after it.
    fault: str | None = None
    # When the head of the engine's answer was here, and its status.
    answered: float | None = None
    status: int | None = None


class RequestTrace:
    """The trace of one request: ids, and moments in the order in which they came."""

    __slots__ = (
        "asked", "attempts", "flags", "method", "new_id", "parent_id", "phases", "span_id",
        "started", "started_ns", "state", "trace_id",
    )  # fmt: skip

    def __init__(
        self,
        trace_id: int,
        parent_id: int | None,
        flags: int,
        state: str,
        new_id: Callable[[], int],
        method: str,
        started: float,
    ) -> None:
        """`state` is the client's tracestate, `started` when the request began (perf_counter)."""
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.flags = flags
        self.state = state
        self.new_id = new_id
        self.span_id = new_id()
        self.method = method[:LONGEST_METHOD]
        self.started = started
        self.started_ns = time_ns() - int((perf_counter() - started) * 1e9)
        self.phases: list[Phase] = [Phase("auth", started)]
        self.attempts: list[Attempt] = []
        self.asked: str | None = None  # the model that could not serve and has fallbacks

    @property
    def sampled(self) -> bool:
        """Whether spans are made of it; engines are told either way."""
        return bool(self.flags & SAMPLED)

    def begin(self, name: str) -> None:
        """Note that a phase begins now, and that the one before has ended."""
        now = perf_counter()
        self._end(now)
        self.phases.append(Phase(name, now))

    def end(self, *, waited: bool = True) -> None:
        """Note that the last phase ends now, or forget it where there was nothing to wait for."""
        if waited:
            self._end(perf_counter())
        else:
            self.phases.pop()

    def ask(self, engine: str | None, fault: EngineError | None = None) -> None:
        """Note that an engine is asked now, after the one before failed with `fault`, if one did.

        None: whichever of them knows the thing that the request is for.
        """
        now = perf_counter()
        self._end(now)
        if fault is not None and self.attempts:
            before = self.attempts[-1]
            before.end = now
            before.fault = fault.reason
        self.attempts.append(Attempt(self.new_id(), now, engine))

    def failed(self, model: str, fault: str) -> None:
        """Note that a model could not serve; `model` is the one that the client asked for."""
        self.asked = model
        now = perf_counter()
        if (phase := self.phases[-1]).end is None:
            phase.end, phase.fault = now, fault
        elif self.attempts and (attempt := self.attempts[-1]).end is None:
            attempt.end, attempt.fault = now, fault

    def answered(self, status: int) -> None:
        """Note that the head of the engine's answer is here."""
        attempt = self.attempts[-1]
        attempt.answered = perf_counter()
        attempt.status = status

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return what tells the engine that was asked last where its spans belong (W3C)."""
        span_id = self.attempts[-1].span_id
        parent = b"00-%032x-%016x-%02x" % (self.trace_id, span_id, self.flags)
        headers = [(b"traceparent", parent)]
        if self.state:
            headers.append((b"tracestate", self.state.encode("latin-1")))
        return headers

    def _end(self, now: float) -> None:
        if self.phases[-1].end is None:
            self.phases[-1].end = now

    def at_ns(self, moment: float) -> int:
        """Return a moment of this request as nanoseconds since 1970."""
        return self.started_ns + int((moment - self.started) * 1e9)


def tracer_for(settings: TracesSettings) -> "Tracer | None":
    """Return what makes traces, None where they go nowhere.

    Raises ConfigError where OpenTelemetry is not installed.
    """
    if settings.endpoint is None:
        return None
    try:
        from app.telemetry.traces.tracer import otlp_tracer
    except ModuleNotFoundError as error:
        raise ConfigError(
            [f"traces.endpoint needs OpenTelemetry ({error.name} is missing): install it with "
             "pip install 'vllm-gateway[traces]'"]
        ) from None  # fmt: skip
    return otlp_tracer(settings.endpoint, settings.sample_ratio)
