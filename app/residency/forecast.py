"""Whether a request waits for its model or goes to a fallback: pure, no I/O, no clock of its own.

The model that can answer first serves, in case of doubt the one that was asked for.

Where the model that was asked for does not come up, its fallbacks are tried in their order. While
it does:

1. a model that is up: the one that was asked for, else the first fallback that is;
2. one that comes up by itself: the request waits for the first of them;
3. a fallback that only a request would load, when its load would end before the model that was
   asked for is up. Where no further load can begin now it would end later in any case.

A start is expected to take as long as the one before it. One that is late is expected to be late
by as much again, so whoever waits for it in vain has lost at most twice what the fallback takes. A
start of which nothing is known counts as the first to be up: it has begun, and the other has not.
Nobody waits for longer than `left_s`; after that the fallbacks are tried in their order.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a model can serve. A model that does not come up has none."""

    # 0: now; None: not known.
    in_s: float | None
    # Only once a request begins its load.
    cold: bool = False

    @property
    def up(self) -> bool:
        return self.in_s == 0 and not self.cold


UP = Forecast(0.0)


class Step(enum.Enum):
    """What a request does next that no engine has served."""

    ASK = enum.auto()  # the model that was asked for
    WAIT = enum.auto()
    GIVE_UP = enum.auto()  # waiting; the fallbacks are left, in their order


def remaining_s(elapsed_s: float, expected_s: float | None) -> float | None:
    """Return how long a start is expected to take from now on; None: not known."""
    if expected_s is None:
        return None
    # Never 0, which is what a model has that is up.
    return max(abs(expected_s - elapsed_s), 0.001)


def next_step(
    asked: Forecast | None,
    fallbacks: Sequence[Forecast | None],
    *,
    left_s: float,
    queued: bool,
) -> Step | int:
    """Return what to do, or the index of the fallback to go to.

    `left_s` is for how much longer the request may wait, `queued` whether a load that begins now
    waits for those that are under way.
    """
    if asked is None:
        return Step.GIVE_UP
    if asked.up:
        return Step.ASK
    for index, fallback in enumerate(fallbacks):
        if fallback is not None and fallback.up:
            return index
    if left_s <= 0:
        return Step.GIVE_UP
    if queued or asked.in_s is None:
        return Step.WAIT
    sooner = (
        (fallback.in_s, index)
        for index, fallback in enumerate(fallbacks)
        if fallback is not None and fallback.cold
        if fallback.in_s is not None and fallback.in_s < asked.in_s
    )
    _, index = min(sooner, default=(0.0, -1))
    return Step.WAIT if index < 0 else index
