"""The life of an engine as a table: pure, no I/O, no clock.

                        ┌───────────────start──────────────┐
                        ▼                                  │
    STOPPED ──start──▶ STARTING ──loaded──▶ READY ──drain──┼─▶ DRAINING ──slept──▶ ASLEEP
       ▲                                     ▲             │      │                  │
       │                                     └───resume────┼──────┘                  │
       │                                                   └─────────────────────────┤
       └──exit── STOPPING ◀──stop── (STARTING, READY, DRAINING, ASLEEP) ◀────────────┘

    FAILED ◀──fail── (STARTING, READY, DRAINING, ASLEEP);  FAILED ──start──▶ STARTING

An exit that was asked for ends in STOPPED, one that was not is a failure. An engine that is judged
to be dead is FAILED from then on, while its remains are swept. A pair that is not in the table is a
bug in the caller and raises, so that no engine can be in a state nobody thought of.
"""

import enum

from engines.base import EngineState

_S = EngineState


class Event(enum.Enum):
    """What can happen to an engine."""

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
    """An event came that the state has no answer to."""


def after(state: EngineState, event: Event) -> EngineState:
    """Return the state that follows. Raises IllegalTransition for a pair outside the table."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(
            f"{event.name} cannot happen to an engine that is {state}"
        ) from None
