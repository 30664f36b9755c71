"""Which replica serves a request: choosing only, synchronous and pure."""

from collections.abc import Sequence
from typing import Protocol

from app.routing.catalogue import Replica
from engines.base import EngineState


class SelectionPolicy(Protocol):
    """A rule that picks a replica."""

    def choose(self, candidates: Sequence[Replica]) -> Replica | None:
        """Return the replica to ask, or None when there is no candidate."""
        ...


class LeastLoaded:
    """The READY replica with the fewest requests in flight; equals take turns.

    One that is not READY comes last instead of never: a remote server may have come back since it
    was asked, and an engine that cannot serve refuses at no cost.
    """

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Replica]) -> Replica | None:
        if not candidates:
            return None
        self._turn += 1
        count = len(candidates)
        ring = (candidates[(self._turn + step) % count] for step in range(count))
        return min(ring, key=lambda r: (r.engine.state is not EngineState.READY, r.in_flight))
