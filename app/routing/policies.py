"""Which replica serves a request: choosing only, synchronous, and pure but for a counter."""

from collections.abc import Sequence
from typing import Protocol

from app.routing.replica import Replica
from engines.base import EngineState


class RoutingHints(Protocol):
    """What tells where a request belongs; each is worked out when a policy asks for it."""

    def session(self) -> bytes:
        """Return what the requests of one session, and no others, have in common."""
        ...

    def prompt(self, most: int) -> bytes:
        """Return `most` bytes, or all, that begin alike for prompts that begin alike."""
        ...


class SelectionPolicy(Protocol):
    """A rule that picks a replica.

    One that is not READY comes last instead of never: a remote server may have come back since it
    was asked, and an engine that cannot serve refuses at no cost.
    """

    def choose(self, candidates: Sequence[Replica], clues: RoutingHints) -> Replica | None:
        """Return the replica to ask, or None when there is no candidate."""
        ...


class LeastLoaded:
    """The replica with the fewest requests in flight; equals take turns."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Replica], clues: RoutingHints) -> Replica | None:
        count = len(candidates)
        if count < 2:
            return candidates[0] if candidates else None
        self._turn += 1
        ring = (candidates[(self._turn + step) % count] for step in range(count))
        return min(ring, key=lambda r: (r.engine.state is not EngineState.READY, r.in_flight))


class RoundRobin:
    """The replica whose turn is the longest ago, whatever it is busy with.

    A plain index would give the turns of a replica that left to the one after it.
    """

    def __init__(self) -> None:
        self._turn = 0
        # The last turn of an engine by its name: there are as many as the configuration ever had.
        self._turns: dict[str, int] = {}

    def choose(self, candidates: Sequence[Replica], clues: RoutingHints) -> Replica | None:
        if not candidates:
            return None
        turns = self._turns
        chosen = min(able(candidates), key=lambda r: turns.get(r.engine.name, 0))
        self._turn += 1
        turns[chosen.engine.name] = self._turn
        return chosen


def able(candidates: Sequence[Replica]) -> Sequence[Replica]:
    """Return the candidates that are READY; all of them where none is."""
    return [r for r in candidates if r.engine.state is EngineState.READY] or candidates
