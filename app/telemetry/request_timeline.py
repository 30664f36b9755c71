"""The moments of one request: which steps it took, and when each began and ended.

The relay notes them while the request is under way. A bar of phases (`request_phases.py`) and the
spans of a trace (`app.telemetry.traces`) are made from them afterwards. A timeline holds times, and
names from the configuration; nothing that a client has sent.

Every request takes the same first steps, so these are plain moments, up to its first attempt at an
engine. What a plain request does not have is objects, in a chain. All are without garbage
collection: the ring keeps thousands, and none refers back.
"""

from time import perf_counter

import msgspec

from engines.base import EngineError

# Names of steps
AUTH, LIMITS, LOAD_WAIT, QUEUE, ATTEMPT = "auth", "limits", "load_wait", "queue", "attempt"
CONTINUATION = "continuation"  # an interrupted stream waits for an engine


class Step(msgspec.Struct, gc=False):
    """A phase of a request, or an attempt at an engine, in perf_counter's time."""

    name: str
    start: float
    previous: "Step | None" = None
    engine: str | None = None  # only an attempt has one
    end: float | None = None  # None: it did not end before the request did
    # The kind of fault that ended it, where the request went on after it.
    fault: str | None = None
    position: int | None = None  # in the queue at its begin; 1: it is next
    # Only of attempts
    answered: float | None = None  # when the head of a stream arrived
    status: int | None = None  # of the engine's response
    resumed: float | None = None  # the first new bytes of a stream that goes on at this engine
    span_id: int = 0  # the parent of the engine's own spans


class RequestTimeline(msgspec.Struct, gc=False):
    """The steps of one request. The request's task writes it."""

    started: float
    # When the caller was known; None also where neither that nor the body took a wait.
    authenticated: float | None = None
    limits_began: float | None = None  # when the body was read, and limits were checked
    # The first attempt, as long as only this is known of it and nothing came before.
    engine: str | None = None
    asked: float | None = None
    status: int | None = None
    # Waits and attempts, from the last to the first; None while the three above are the only one.
    last: Step | None = None
    # The model that the client asked for, where it could not serve.
    requested_model: str | None = None
    # The id of its trace in hexadecimal, where that is sampled.
    sampled_id: str | None = None

    def note_authenticated(self) -> None:
        """Note that the caller is known; needed only after a wait for that, or before one."""
        if self.authenticated is None:
            self.authenticated = perf_counter()

    def begin(self, name: str, position: int | None = None) -> None:
        """Note that a wait begins now; `position` is its place in the queue."""
        now = perf_counter()
        last = self._last_step()
        if last is not None and last.end is None:
            last.end = now
        self.last = Step(name, now, last, position=position)

    def end(self, *, waited: bool) -> None:
        """Note that the last wait ends now; forget it where nothing was waited for."""
        last = self.last
        assert last is not None
        if waited:
            last.end = perf_counter()
        else:
            self.last = last.previous

    def begin_attempt(self, engine: str, fault: EngineError | None = None) -> None:
        """Note an attempt at an engine; `fault` is what the previous attempt failed with."""
        now = perf_counter()
        if self.last is None and self.engine is None:
            self.engine = engine
            self.asked = now
            return
        last = self._last_step()
        if last is not None and last.end is None:
            last.end = now
            if fault is not None and last.engine is not None:
                last.fault = fault.reason
        self.last = Step(ATTEMPT, now, last, engine)

    def answered(self, status: int) -> None:
        """Note the status of the engine's response."""
        if self.last is None:
            self.status = status
        else:
            self.last.status = status

    def begin_stream(self) -> None:
        """Note that the head of a stream has arrived."""
        if (attempt := self._last_step()) is not None:
            attempt.answered = perf_counter()

    def failed(self, model: str, fault: str) -> None:
        """Note that a model could not serve; `model` is the one that the client asked for."""
        self.requested_model = model
        self._fail(fault)

    def interrupted(self, fault: EngineError) -> None:
        """Note that the engine of a stream failed, and that the stream waits for another."""
        self._fail(fault.reason)
        self.begin(CONTINUATION)

    def resumed(self) -> None:
        """Note the first new bytes of a stream that goes on."""
        if (attempt := self._last_step()) is not None:
            attempt.resumed = perf_counter()

    def trace_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of W3C's trace context for the engine of the last attempt."""
        return []

    def _fail(self, fault: str) -> None:
        """End the last step with a fault, unless it has ended."""
        last = self._last_step()
        if last is None:
            if self.limits_began is not None:
                self.last = Step(LIMITS, self.limits_began, end=perf_counter(), fault=fault)
        elif last.end is None:
            last.end, last.fault = perf_counter(), fault

    def _last_step(self) -> Step | None:
        """Return the last wait or attempt, as a step of the chain."""
        if self.engine is not None and self.asked is not None:
            self.last = Step(ATTEMPT, self.asked, None, self.engine, status=self.status)
            self.engine = None
        return self.last

    def steps(self) -> list[Step]:
        """Return all steps in their order."""
        steps: list[Step] = []
        step = self._last_step()
        while step is not None:
            steps.append(step)
            step = step.previous
        if (began := self.limits_began) is not None and (not steps or steps[-1].name != LIMITS):
            steps.append(Step(LIMITS, began, end=steps[-1].start if steps else None))
        known = self.authenticated
        steps.append(Step(AUTH, self.started, end=self.limits_began if known is None else known))
        steps.reverse()
        return steps
