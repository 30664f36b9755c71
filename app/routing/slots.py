"""This gateway's part of the slots of a model's engines.

Each engine has a target of requests in flight: `queue.max_in_flight`, or what `app/concurrency` has
found. Gateways that serve the same engines divide their slots evenly: of n gateways the one of
rank r has the slots r, r + n, r + 2n and so on. All ranks together have every slot exactly once,
without a message about slots; while gateways disagree about their number, the sum is off for as
long as they do.
"""

from collections.abc import Sequence

from app.routing.replica import Replica
from app.settings import SlotsPerEngine
from engines.base import EngineState


def count_slots(replicas: Sequence[Replica], per_engine: SlotsPerEngine) -> int:
    """Return the number of slots of the READY engines that are this gateway's; at least one.

    An engine that is taken out for its answers has none. Without a READY engine one engine's slots
    remain, for requests that get its error.
    """
    ready = [
        r for r in replicas if r.engine.state is EngineState.READY and not r.is_out
    ] or replicas[:1]
    # Engines of the same gateways are divided together: fewer slots are lost to rounding up.
    targets: dict[tuple[int, int], int] = {}
    for replica in ready:
        target = replica.target if per_engine == "auto" else per_engine
        targets[replica.division] = targets.get(replica.division, 0) + target
    slots = (
        (target - rank + gateways - 1) // gateways for (gateways, rank), target in targets.items()
    )
    return max(sum(slots), 1)
