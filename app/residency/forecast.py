"""Decides whether a request waits for its model or goes to a fallback. Pure, without a clock.

The model that can answer first serves; in case of doubt, the requested one. If the requested model
is not coming up, its fallbacks are tried in order. While it is coming up:

1. A model that is up serves: the requested one, else the first fallback that is.
2. Among models that are coming up by themselves, the request waits for the first one to be up.
3. A fallback that only a request would load is used if its load would end before the requested
   model is up. If no further load can begin now, it would end later in any case.

A start is expected to take as long as the previous one. A late start is expected to be late by as
much again, so a request that waits in vain loses at most twice the duration of the fallback's load.
A start of unknown duration counts as the first to be up: it has begun, and the other has not. No
request waits longer than `left_s`; after that the fallbacks are tried in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a model can serve. A model that is not coming up has no forecast."""

    # 0: now; None: unknown.
    in_s: float | None
    # Its load begins only at a request.
    cold: bool = False
    # It is started again after a start that failed, so it may stay down.
    doubtful: bool = False

    @property
    def up(self) -> bool:
        return self.in_s == 0 and not self.cold


UP = Forecast(0.0)


@dataclass(frozen=True, slots=True)
class Ask:
    """Send the request to the requested model."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the requested model."""


@dataclass(frozen=True, slots=True)
class Use:
    """Send the request to a fallback."""

    index: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop waiting; try the fallbacks in order."""


# The next step of a request that was not served yet.
NextStep = Ask | Wait | Use | GiveUp


def remaining_s(elapsed_s: float, expected_s: float | None) -> float | None:
    """Return the expected remaining duration of a start; None: unknown."""
    if expected_s is None:
        return None
    # Never 0, which means up.
    return max(abs(expected_s - elapsed_s), 0.001)


def own_step(asked: Forecast | None, *, most_s: float, left_s: float) -> Ask | Wait | GiveUp:
    """Return the next step of a request that has no fallback.

    `most_s` is the longest time that a request may wait for its model, of which `left_s` remain. A
    start that is expected to take longer than `most_s` is not waited for at all.
    """
    if asked is None:
        return GiveUp()
    if asked.up:
        return Ask()
    in_time = left_s > 0 and (asked.in_s is None or asked.in_s <= most_s)
    return Wait() if in_time else GiveUp()


def next_step(
    asked: Forecast | None,
    fallbacks: Sequence[Forecast | None],
    *,
    left_s: float,
    queued: bool,
) -> NextStep:
    """Return the next step of a request.

    `left_s` is the remaining time that the request may wait; `queued` says that a load which begins
    now has to wait for others. A doubtful model is waited for only where no fallback serves.
    """
    if asked is None or asked.doubtful:
        return GiveUp()
    if asked.up:
        return Ask()
    for index, fallback in enumerate(fallbacks):
        if fallback is not None and fallback.up:
            return Use(index)
    if left_s <= 0:
        return GiveUp()
    if queued or asked.in_s is None:
        return Wait()
    sooner = (
        (fallback.in_s, index)
        for index, fallback in enumerate(fallbacks)
        if fallback is not None and fallback.cold
        if fallback.in_s is not None and fallback.in_s < asked.in_s
    )
    _, index = min(sooner, default=(0.0, -1))
    return Wait() if index < 0 else Use(index)
