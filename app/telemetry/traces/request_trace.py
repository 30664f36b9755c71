"""The trace of one request while it is under way: its timeline, and the ids of its spans.

Nothing of OpenTelemetry: spans are made from a trace once the request has ended (`spans.py`). Only
the ids that an engine receives in its `traceparent` exist before.
"""

from collections.abc import Callable
from time import perf_counter, time_ns

from app.telemetry.request_timeline import RequestTimeline
from engines.base import EngineError

SAMPLED = 1
MAX_METHOD_LENGTH = 16


class RequestTrace(RequestTimeline, kw_only=True):
    """The timeline of a request with the ids of its trace."""

    trace_id: int
    parent_id: int | None
    flags: int
    state: str  # the client's tracestate
    method: str
    started_ns: int  # since 1970
    span_id: int
    new_id: Callable[[], int]

    @classmethod
    def of(
        cls,
        trace_id: int,
        parent_id: int | None,
        flags: int,
        state: str,
        new_id: Callable[[], int],
        method: str,
        started: float,
    ) -> "RequestTrace":
        """Return the trace of a request that began at `started` (perf_counter)."""
        return cls(
            started,
            sampled_id=f"{trace_id:032x}" if flags & SAMPLED else None,
            trace_id=trace_id,
            parent_id=parent_id,
            flags=flags,
            state=state,
            method=method[:MAX_METHOD_LENGTH],
            started_ns=time_ns() - int((perf_counter() - started) * 1e9),
            span_id=new_id(),
            new_id=new_id,
        )

    @property
    def sampled(self) -> bool:
        """True if spans are exported for it; engines receive its IDs either way."""
        return self.sampled_id is not None

    def begin_attempt(self, engine: str, fault: EngineError | None = None) -> None:
        RequestTimeline.begin_attempt(self, engine, fault)
        attempt = self._last_step()
        assert attempt is not None
        attempt.span_id = self.new_id()

    def trace_headers(self) -> list[tuple[bytes, bytes]]:
        assert self.last is not None
        parent = b"00-%032x-%016x-%02x" % (self.trace_id, self.last.span_id, self.flags)
        headers = [(b"traceparent", parent)]
        if self.state:
            headers.append((b"tracestate", self.state.encode("latin-1")))
        return headers

    def at_ns(self, moment: float) -> int:
        """Return a moment of this request in nanoseconds since 1970."""
        return self.started_ns + int((moment - self.started) * 1e9)
