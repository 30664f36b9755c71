"""The trace of one request while it is under way: ids and moments, nothing of OpenTelemetry.

The relay notes moments; spans are made from them once the request has ended (`spans.py`). Only the
ids that an engine receives in its `traceparent` exist before.

Where traces are off, requests have `NO_TRACE`, which ignores every note: callers never ask.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter, time_ns
from typing import Protocol

from app.telemetry.request_record import RequestRecord
from engines.base import EngineError

SAMPLED = 1
MAX_METHOD_LENGTH = 16


@dataclass(slots=True)
class Phase:
    """A part of a request, in perf_counter's time. `end` is None for a phase that did not end."""

    name: str
    start: float
    end: float | None = None
    # The kind of fault that ended it, where another model was tried after it.
    fault: str | None = None


@dataclass(slots=True)
class Attempt:
    """One attempt at an engine, the parent of the engine's own spans."""

    span_id: int
    start: float
    engine: str
    end: float | None = None
    # The kind of fault with which it failed, where another engine was tried after it.
    fault: str | None = None
    # When the head of the engine's response arrived, and its status.
    answered: float | None = None
    status: int | None = None


class RequestTrace:
    """The trace of one request: its ids, its phases and its attempts, in their order."""

    __slots__ = (
        "attempts", "flags", "method", "new_id", "parent_id", "phases",
        "requested_model", "span_id", "started", "started_ns", "state", "trace_id",
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
        self.method = method[:MAX_METHOD_LENGTH]
        self.started = started
        self.started_ns = time_ns() - int((perf_counter() - started) * 1e9)
        self.phases: list[Phase] = [Phase("auth", started)]
        self.attempts: list[Attempt] = []
        # The model that the client asked for, where it could not serve.
        self.requested_model: str | None = None

    @property
    def sampled(self) -> bool:
        """True if spans are exported for it; engines receive its IDs either way."""
        return bool(self.flags & SAMPLED)

    @property
    def sampled_id(self) -> str | None:
        """The trace's id in hexadecimal; None where it is not sampled."""
        return f"{self.trace_id:032x}" if self.sampled else None

    def begin(self, name: str) -> None:
        """Note that a phase begins now, and that the previous one has ended."""
        now = perf_counter()
        self._end(now)
        self.phases.append(Phase(name, now))

    def end(self, *, waited: bool = True) -> None:
        """Note that the last phase ends now; forget the phase where nothing was waited for."""
        if waited:
            self._end(perf_counter())
        else:
            self.phases.pop()

    def begin_attempt(self, engine: str, fault: EngineError | None = None) -> None:
        """Note an attempt at an engine; `fault` is what the previous attempt failed with."""
        now = perf_counter()
        self._end(now)
        if fault is not None and self.attempts:
            before = self.attempts[-1]
            before.end = now
            before.fault = fault.reason
        self.attempts.append(Attempt(self.new_id(), now, engine))

    def failed(self, model: str, fault: str) -> None:
        """Note that a model could not serve; `model` is the one that the client asked for."""
        self.requested_model = model
        now = perf_counter()
        if (phase := self.phases[-1]).end is None:
            phase.end, phase.fault = now, fault
        elif self.attempts and (attempt := self.attempts[-1]).end is None:
            attempt.end, attempt.fault = now, fault

    def answered(self, status: int) -> None:
        """Note that the head of the engine's response has arrived."""
        attempt = self.attempts[-1]
        attempt.answered = perf_counter()
        attempt.status = status

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of W3C's trace context for the engine of the last attempt."""
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
        """Return a moment of this request in nanoseconds since 1970."""
        return self.started_ns + int((moment - self.started) * 1e9)


class NoTrace(RequestTrace):
    """The trace of a request while traces are off: ignores every note."""

    __slots__ = ()
    sampled = False
    sampled_id = None

    def __init__(self) -> None:
        """It has no ids and no moments."""

    def begin(self, name: str) -> None:
        pass

    def end(self, *, waited: bool = True) -> None:
        pass

    def begin_attempt(self, engine: str, fault: EngineError | None = None) -> None:
        pass

    def failed(self, model: str, fault: str) -> None:
        pass

    def answered(self, status: int) -> None:
        pass

    def headers(self) -> list[tuple[bytes, bytes]]:
        return []


NO_TRACE = NoTrace()


class RequestTracer(Protocol):
    """Gives each request its trace, and takes it back when the request has ended."""

    def begin(
        self, method: str, headers: Iterable[tuple[bytes, bytes]], started: float
    ) -> RequestTrace: ...

    def end(self, record: RequestRecord, trace: RequestTrace) -> None: ...


class NoTracer:
    """The tracer while traces are off."""

    def begin(
        self, method: str, headers: Iterable[tuple[bytes, bytes]], started: float
    ) -> RequestTrace:
        return NO_TRACE

    def end(self, record: RequestRecord, trace: RequestTrace) -> None:
        pass


NO_TRACER = NoTracer()
