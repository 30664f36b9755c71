"""Selection by load alone, the default policy."""

from collections.abc import Sequence

from app.routing.replica import Replica
from app.routing.selection import RoutingHints
from engines.base import EngineState


class LeastLoaded:
    """Chooses the replica with the fewest requests in flight; ties take turns."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Replica], hints: RoutingHints) -> Replica | None:
        count = len(candidates)
        if count < 2:
            return candidates[0] if candidates else None
        self._turn += 1
        ring = (candidates[(self._turn + step) % count] for step in range(count))
        return min(
            ring,
            key=lambda r: (
                r.engine.state is not EngineState.READY,
                r.in_flight * r.weight + r.offset,
            ),
        )
