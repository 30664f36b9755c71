"""Timelines as text, for the ledger: moments in microseconds from the arrival. Pure.

A JSON list, without the names of fields: most requests have only the first five.

    [authenticated, limits_began, engine, asked, status, requested_model, steps]
"""

import msgspec

from app.telemetry.request_timeline import RequestTimeline, Step

# The last ones are kept of a request with more attempts.
MAX_STEPS = 64


class _StoredStep(msgspec.Struct, array_like=True, gc=False):
    """A step; the fields are those of `Step`."""

    name: str
    start: int
    end: int | None
    engine: str | None
    fault: str | None
    position: int | None
    answered: int | None
    status: int | None
    resumed: int | None


class _StoredTimeline(msgspec.Struct, array_like=True, gc=False):
    """A timeline; the fields are those of `RequestTimeline`."""

    authenticated: int | None
    limits_began: int | None
    engine: str | None
    asked: int | None
    status: int | None
    requested_model: str | None
    steps: list[_StoredStep]


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(_StoredTimeline)


def timeline_to_text(timeline: RequestTimeline) -> str:
    """Return a timeline as text."""
    started = timeline.started
    steps: list[_StoredStep] = []
    step = timeline.last
    while step is not None and len(steps) < MAX_STEPS:
        steps.append(
            _StoredStep(
                step.name,
                _since(started, step.start),
                _maybe_since(started, step.end),
                step.engine,
                step.fault,
                step.position,
                _maybe_since(started, step.answered),
                step.status,
                _maybe_since(started, step.resumed),
            )
        )
        step = step.previous
    steps.reverse()
    stored = _StoredTimeline(
        _maybe_since(started, timeline.authenticated),
        _maybe_since(started, timeline.limits_began),
        timeline.engine,
        _maybe_since(started, timeline.asked),
        timeline.status,
        timeline.requested_model,
        steps,
    )
    return _encode(stored).decode()


def timeline_of_text(text: str, started: float) -> RequestTimeline:
    """Return the timeline of a text, of a request that began at `started` (perf_counter).

    Raises ValueError.
    """
    stored = _decoder.decode(text)
    last: Step | None = None
    for step in stored.steps:
        last = Step(
            step.name,
            started + step.start / 1e6,
            last,
            step.engine,
            _moment(started, step.end),
            step.fault,
            step.position,
            _moment(started, step.answered),
            step.status,
            _moment(started, step.resumed),
        )
    return RequestTimeline(
        started,
        _moment(started, stored.authenticated),
        _moment(started, stored.limits_began),
        stored.engine,
        _moment(started, stored.asked),
        stored.status,
        last,
        stored.requested_model,
    )


def _since(started: float, moment: float) -> int:
    return round((moment - started) * 1e6)


def _maybe_since(started: float, moment: float | None) -> int | None:
    return None if moment is None else round((moment - started) * 1e6)


def _moment(started: float, since_us: int | None) -> float | None:
    return None if since_us is None else started + since_us / 1e6
