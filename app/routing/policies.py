"""Selection policies: each chooses a replica for a request; synchronous, no I/O.

To add a policy, write a class with `choose`, add it to `POLICIES` at the end of this file and its
name to `ModelSettings.policy`.

The affinity policies keep together what belongs together. vLLM reuses the KV cache of a prompt
prefix on the replica that computed it, so the next turn of a conversation is cheap where the
previous one ran. But a session with many concurrent requests, or a system prompt that all clients
send, must not overload one replica while others idle: a replica above its load bound is skipped, as
in consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016).
tests/app/routing/simulation.py has the figures.
"""

from collections.abc import Mapping, Sequence

from app.routing.least_loaded import LeastLoaded
from app.routing.prefix_affinity import PrefixAffinity
from app.routing.replica import Replica
from app.routing.selection import (
    RoutingHints,
    SelectionPolicy,
    max_known_engines,
    rank_by_rendezvous,
    ready_or_all,
    within_load_bound,
)


class RoundRobin:
    """Chooses the replica whose turn was longest ago, regardless of its load.

    A plain index would give the turns of a replica that left to the one after it.
    """

    def __init__(self) -> None:
        self._turn = 0
        # Latest turn by engine name, bounded by `max_known_engines`.
        self._turns: dict[str, int] = {}

    def choose(self, candidates: Sequence[Replica], hints: RoutingHints) -> Replica | None:
        if not candidates:
            return None
        turns = self._turns
        chosen = min(ready_or_all(candidates), key=lambda r: turns.get(r.engine.name, 0))
        self._turn += 1
        turns[chosen.engine.name] = self._turn
        if len(turns) > max_known_engines(candidates):
            # An engine without a turn is as good as one whose turn was longest ago.
            del turns[min(turns, key=turns.__getitem__)]
        return chosen


class SessionAffinity:
    """Chooses by rendezvous hashing of the session: one replica more or less moves 1/n of them."""

    def choose(self, candidates: Sequence[Replica], hints: RoutingHints) -> Replica | None:
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        return rank_by_rendezvous(within_load_bound(candidates, hints.slots), hints.session())[0]


# Every policy by its name in the configuration (`models[].policy`).
POLICIES: Mapping[str, type[SelectionPolicy]] = {
    "least_loaded": LeastLoaded,
    "prefix": PrefixAffinity,
    "round_robin": RoundRobin,
    "session": SessionAffinity,
}
