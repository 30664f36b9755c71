"""The life of an engine as a table: pure, no I/O, no clock.

    STOPPED ──start──▶ STARTING ──loaded──▶ READY ──drain──▶ DRAINING
       ▲                  │  │                │ │               │ │
       │                  │  └──────exit──────┼─┴──────exit─────┼─┴──▶ FAILED ──start──▶ STARTING
       └──exit── STOPPING ◀───────stop────────┴───────stop──────┘

An exit that was asked for ends in STOPPED, one that was not in FAILED. A pair that is not in the
table is a bug in the caller and raises, so that no engine can be in a state nobody thought of.
"""

import enum

from engines.base import EngineState

_S = EngineState


class Event(enum.Enum):
    """What can happen to an engine."""

    START = enum.auto()
    LOADED = enum.auto()
    DRAIN = enum.auto()
    STOP = enum.auto()
    EXIT = enum.auto()


TRANSITIONS: dict[tuple[EngineState, Event], EngineState] = {
    (_S.STOPPED, Event.START): _S.STARTING,
    (_S.STOPPED, Event.STOP): _S.STOPPED,
    (_S.FAILED, Event.START): _S.STARTING,
    (_S.FAILED, Event.STOP): _S.STOPPED,
    (_S.STARTING, Event.LOADED): _S.READY,
    (_S.STARTING, Event.STOP): _S.STOPPING,
    (_S.STARTING, Event.EXIT): _S.FAILED,
    (_S.READY, Event.DRAIN): _S.DRAINING,
    (_S.READY, Event.STOP): _S.STOPPING,
    (_S.READY, Event.EXIT): _S.FAILED,
    (_S.DRAINING, Event.STOP): _S.STOPPING,
    (_S.DRAINING, Event.EXIT): _S.FAILED,
    (_S.STOPPING, Event.EXIT): _S.STOPPED,
}


class IllegalTransition(Exception):
    """An event came that the state has no answer to."""


def after(state: EngineState, event: Event) -> EngineState:
    """Return the state that follows. Raises IllegalTransition for a pair outside the table."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(
            f"{event.name} cannot happen to an engine that is {state}"
        ) from None
