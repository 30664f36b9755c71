"""Samples of how hostile requests of one tenant affect the other tenants. Pure."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from bench.figures import median

PART = "noisy-neighbor"
# The row without a hostile body: the noise of the machine and of the measurement.
NO_BODY = "none"
STREAMS = 64
AT_ONCE = 8


class Disturbance(msgspec.Struct, frozen=True, kw_only=True):
    """One send of a hostile body: `at_once` requests concurrently."""

    part: str = PART
    body: str
    target: str
    at_once: int
    round: int
    outcomes: list[str]  # of the hostile requests
    before_body: bool | None  # whether each was refused before its body was sent; None: not tested
    seconds: float  # until the last hostile request ended
    gap_ms: float | None  # longest gap between two chunks of any stream
    wait_ms: float | None  # longest wait of a probe for its response
    stop_ms: float | None  # longest such wait, each capped at the target's CPU time during it
    rss_growth_mib: float | None
    streams_lost: int = 0
    died: bool = False


# A field of Disturbance.
Figure = Literal["gap_ms", "rss_growth_mib", "stop_ms", "wait_ms"]


class Disturbances:
    """Every disturbance of a run."""

    def __init__(self, disturbances: Iterable[Disturbance] = ()) -> None:
        self._all = list(disturbances)

    def __bool__(self) -> bool:
        return bool(self._all)

    def rows(self) -> list[tuple[str, str]]:
        """Return every pair of body and target, in the order of the run."""
        return list(dict.fromkeys((one.body, one.target) for one in self._all))

    def median(self, body: str, target: str, at_once: int, figure: Figure) -> float | None:
        """Return the median over the rounds; None where nothing was measured."""
        rounds = self._of(body, target)
        return median(getattr(one, figure) for one in rounds if one.at_once == at_once)

    def outcome(self, body: str, target: str) -> str:
        """Return a summary: the statuses, the streams that were lost, whether the target died."""
        rounds = self._of(body, target)
        words = sorted({name for one in rounds for name in one.outcomes})
        early = {one.before_body for one in rounds} - {None}
        if early:
            words.append("before the body" if early == {True} else "after the body")
        if lost := max(one.streams_lost for one in rounds):
            words.append(f"{lost} streams lost")
        if any(one.died for one in rounds):
            words.append("died")
        return ", ".join(words)

    def longest_stop_ms(self, target: str) -> float | None:
        """Return the longest stop over all bodies, each with its median."""
        stops = [
            self.median(body, target, at_once, "stop_ms")
            for body in {one.body for one in self._all} - {NO_BODY}
            for at_once in (1, AT_ONCE)
        ]
        return max((stop for stop in stops if stop is not None), default=None)

    def _of(self, body: str, target: str) -> list[Disturbance]:
        return [one for one in self._all if (one.body, one.target) == (body, target)]
