"""The phases of a request, as the parts of one bar from its arrival to its last byte. Pure.

| phase          | the request                                                  | note           |
|----------------|--------------------------------------------------------------|----------------|
| `auth`         | its key is looked up                                         |                |
| `body`         | its body is read and planned                                 |                |
| `limits`       | its rate limits and budgets are checked                      |                |
| `load_wait`    | waits until its model is loaded                              |                |
| `queue`        | waits for a free slot                                        | position       |
| `attempt`      | is at an engine that fails before the first token            | engine, fault  |
| `prefill`      | is at an engine, until the first token of the stream         | engine         |
| `decode`       | streams                                                      | engine, fault  |
| `generate`     | is at an engine that answers without a stream                | engine         |
| `continuation` | was interrupted, until the first new bytes                   | engine         |
| `client_wait`  | waited for its client to read: all its waits, put last      |                |
"""

from collections.abc import Iterator
from itertools import pairwise

import msgspec

from app.telemetry.request_record import RequestRecord
from app.telemetry.request_timeline import ATTEMPT, AUTH, CONTINUATION, RequestTimeline, Step

BODY, PREFILL, DECODE, GENERATE, CLIENT_WAIT = (
    "body", "prefill", "decode", "generate", "client_wait",
)  # fmt: skip


class RequestPhase(msgspec.Struct, frozen=True):
    """A part of a request, in seconds from its arrival."""

    name: str
    start_s: float
    end_s: float
    note: str = ""


class _Cut(msgspec.Struct, frozen=True):
    """A moment at which a phase begins."""

    moment: float
    name: str
    note: str = ""


def request_phases(record: RequestRecord, timeline: RequestTimeline) -> list[RequestPhase]:
    """Return the phases of a request, in order, without gaps, from 0 to `record.total_s`.

    Of a request that is under way, `total_s` is the time until now.
    """
    steps = timeline.steps()
    total_s = max(record.total_s, 0.0)
    first = None if record.ttft_s is None else timeline.started + record.ttft_s
    cuts = [*_cuts(steps, first), _Cut(timeline.started + total_s, "")]
    phases: list[RequestPhase] = []
    at_s = 0.0
    for cut, following in pairwise(cuts):
        until_s = min(max(following.moment - timeline.started, at_s), total_s)
        if following is cuts[-1]:
            until_s = total_s
        if until_s > at_s:
            phases.append(RequestPhase(cut.name, at_s, until_s, cut.note))
            at_s = until_s
    return _with_client_wait(phases, record.client_wait_s)


def _cuts(steps: list[Step], first: float | None) -> Iterator[_Cut]:
    """Yield the beginnings of phases; `first` is when the first token was sent."""
    for step in steps:
        if step.engine is not None:
            token = step.resumed
            if token is None and first is not None and _contains(step, first):
                token, first = first, None
            yield from _attempt(step, step.engine, token)
            continue
        yield _Cut(step.start, step.name, _note(step))
        if step.name == AUTH and step.end is not None:
            yield _Cut(step.end, BODY)


def _attempt(attempt: Step, engine: str, token: float | None) -> Iterator[_Cut]:
    """Yield the phases of an attempt; `token` is when its first token was sent, if any was."""
    if token is None:
        name = GENERATE if attempt.fault is None else ATTEMPT
        yield _Cut(attempt.start, name, _note(attempt, engine))
        return
    name = PREFILL if attempt.resumed is None else CONTINUATION
    yield _Cut(attempt.start, name, engine)
    yield _Cut(token, DECODE, _note(attempt, engine))


def _contains(attempt: Step, moment: float) -> bool:
    return attempt.start <= moment and (attempt.end is None or moment <= attempt.end)


def _note(step: Step, engine: str | None = None) -> str:
    """Return a phase's engine, position and fault, in words."""
    words = [] if engine is None else [engine]
    if step.position is not None:
        words.append(f"position {step.position}")
    if step.fault is not None:
        words.append(f"failed: {step.fault}")
    return ", ".join(words)


def _with_client_wait(phases: list[RequestPhase], wait_s: float) -> list[RequestPhase]:
    """Return the phases with the waits for the client, which were in the last one, at the end."""
    if not phases:
        return phases
    *before, last = phases
    begin_s = max(last.end_s - wait_s, last.start_s)
    if begin_s >= last.end_s:
        return phases
    wait = RequestPhase(CLIENT_WAIT, begin_s, last.end_s)
    if begin_s <= last.start_s:
        return [*before, wait]
    return [*before, RequestPhase(last.name, last.start_s, begin_s, last.note), wait]
