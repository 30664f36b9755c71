"""The state machine of an engine as a table: pure, no I/O, no clock.

                        ┌───────────────start──────────────┐
                        ▼                                  │
    STOPPED ──start──▶ STARTING ──loaded──▶ READY ──drain──┼─▶ DRAINING ──slept──▶ ASLEEP
       ▲                                     ▲             │      │                  │
       │                                     └───resume────┼──────┘                  │
       │                                                   └─────────────────────────┤
       └──exit── STOPPING ◀──stop── (STARTING, READY, DRAINING, ASLEEP) ◀────────────┘

    FAILED ◀──fail── (STARTING, READY, DRAINING, ASLEEP);  FAILED ──start──▶ STARTING

A requested exit ends in STOPPED; any other exit is a failure. An engine that is found dead is
FAILED from then on, while its remaining processes are ended. A pair that is not in the table is a
bug in the caller and raises, so an engine is never in an undefined state.
"""

import enum


class EngineState(enum.StrEnum):
    """The states of an engine."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    ASLEEP = "asleep"
    FAILED = "failed"


_S = EngineState


class Event(enum.Enum):
    """The events in the life of an engine."""

    START = enum.auto()
    LOADED = enum.auto()
    DRAIN = enum.auto()
    RESUME = enum.auto()
    SLEPT = enum.auto()
    STOP = enum.auto()
    EXIT = enum.auto()
    FAIL = enum.auto()


TRANSITIONS: dict[tuple[EngineState, Event], EngineState] = {
    (_S.STOPPED, Event.START): _S.STARTING,
    (_S.STOPPED, Event.STOP): _S.STOPPED,
    (_S.FAILED, Event.START): _S.STARTING,
    (_S.FAILED, Event.STOP): _S.STOPPED,
    (_S.STARTING, Event.LOADED): _S.READY,
    (_S.STARTING, Event.STOP): _S.STOPPING,
    (_S.STARTING, Event.FAIL): _S.FAILED,
    (_S.READY, Event.DRAIN): _S.DRAINING,
    (_S.READY, Event.STOP): _S.STOPPING,
    (_S.READY, Event.FAIL): _S.FAILED,
    (_S.DRAINING, Event.RESUME): _S.READY,
    (_S.DRAINING, Event.SLEPT): _S.ASLEEP,
    (_S.DRAINING, Event.STOP): _S.STOPPING,
    (_S.DRAINING, Event.FAIL): _S.FAILED,
    (_S.ASLEEP, Event.START): _S.STARTING,
    (_S.ASLEEP, Event.STOP): _S.STOPPING,
    (_S.ASLEEP, Event.FAIL): _S.FAILED,
    (_S.STOPPING, Event.EXIT): _S.STOPPED,
}


class IllegalTransition(Exception):
    """The state has no transition for the event."""


def after(state: EngineState, event: Event) -> EngineState:
    """Return the state that follows. Raises IllegalTransition for a pair outside the table."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(
            f"{event.name} cannot happen to an engine that is {state}"
        ) from None
