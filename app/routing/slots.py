"""This gateway's part of the slots of a model's engines.

Each engine has a target of requests in flight, `queue.max_in_flight`. Gateways that serve the same
engines divide their slots evenly: of n gateways the one of rank r has the slots r, r + n, r + 2n
and so on. All ranks together have every slot exactly once, without a message about slots; while
gateways disagree about their number, the sum is off for as long as they do.
"""

from collections.abc import Sequence

from app.routing.replica import UNDIVIDED, Replica
from engines.base import EngineState


def count_slots(replicas: Sequence[Replica], per_engine: int) -> int:
    """Return the number of slots of the READY engines that are this gateway's; at least one.

    Without a READY engine one engine's slots remain, for requests that get its error.
    """
    ready = [r for r in replicas if r.engine.state is EngineState.READY] or replicas[:1]
    divisions = [replica.division for replica in ready]
    if not divisions or divisions.count(UNDIVIDED) == len(divisions):
        return max(per_engine * len(divisions), 1)
    # Engines of the same gateways are divided together: fewer slots are lost to rounding up.
    slots = (
        (per_engine * divisions.count((gateways, rank)) - rank + gateways - 1) // gateways
        for gateways, rank in set(divisions)
    )
    return max(sum(slots), 1)
