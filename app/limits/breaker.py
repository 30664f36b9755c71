"""The circuit breaker before Redis as a table: pure, no I/O, no clock.

    CLOSED ──call failed──▶ OPEN ──probe succeeded──▶ CLOSED

While it is open nobody asks Redis but the probe. What comes late, such as the failure of a second
call that was under way, changes nothing.
"""

import enum


class RedisUnavailable(Exception):
    """Redis did not answer in time, or not as it should. The message holds no password."""


class State(enum.Enum):
    """Whether calls are made."""

    CLOSED = enum.auto()
    OPEN = enum.auto()


class Event(enum.Enum):
    """What can happen to a call or a probe."""

    CALL_FAILED = enum.auto()
    PROBE_FAILED = enum.auto()
    PROBE_SUCCEEDED = enum.auto()


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.CLOSED, Event.CALL_FAILED): State.OPEN,
    (State.CLOSED, Event.PROBE_FAILED): State.OPEN,
    (State.CLOSED, Event.PROBE_SUCCEEDED): State.CLOSED,
    (State.OPEN, Event.CALL_FAILED): State.OPEN,
    (State.OPEN, Event.PROBE_FAILED): State.OPEN,
    (State.OPEN, Event.PROBE_SUCCEEDED): State.CLOSED,
}


def after(state: State, event: Event) -> State:
    """Return the state that follows."""
    return TRANSITIONS[state, event]
