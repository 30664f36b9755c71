"""Selection by what the engines have cached: the policy `prefix`.

A request goes to a replica that has cached most of its prompt, and among several to the one that
will have computed the rest first. It goes elsewhere where that would be sooner by more than
BUDGET_S and the time that it takes to compute the cached part anew, or where the replica is above
the load bound: a system prompt that all clients send must not keep one replica busy while others
idle. A prompt of which less is cached has no such budget. One of which nothing is cached goes where
every gateway would send it; a gateway alone does so only among the caches that are the least full.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

from app.routing.least_loaded import LeastLoaded
from app.routing.prefix_table import MAX_PROMPT_BYTES, PrefixTable, block_checksums, prefix_bytes
from app.routing.replica import Replica
from app.routing.selection import (
    RoutingHints,
    max_known_engines,
    rank_by_rendezvous,
    within_load_bound,
)
from engines.base import EngineState

# Share of a prompt that a replica has to have cached for the prompt to stay with it.
MOSTLY = 0.8
# Seconds for which a prompt waits for a replica that has cached it, beyond what it costs to compute
# it elsewhere, where it would take the place of other prompts in the cache.
BUDGET_S = 1.0
# How much fuller, as a share of its size, the cache may be that gets a new prompt. Gateways that do
# not know of each other agree on an engine the more often, the larger it is.
EVENLY = 0.1
# English in JSON. Both the table's size and the tokens in flight go by it.
BYTES_PER_TOKEN = 4
# Bound of the tables: 262144 blocks take 44 MiB of memory. The largest table gives way.
MAX_KNOWN_BLOCKS = 262144
# Size of the table of an engine that does not report how much its KV cache holds, in tokens.
DEFAULT_KV_TOKENS = 2_000_000

# A replica, last, after the expected wait, its load, its turn, and the bytes that it has cached.
# Options are compared with each other, and no two have the same turn.
Option = tuple[float, int, int, int, Replica]


class PrefixAffinity:
    """Chooses the replica that has cached most of a prompt, unless others are sooner all the same.

    The tables of what was sent are this gateway's own, one per engine, as large as its KV cache,
    and forgotten when it restarts. Tenants with different salts have no prefix in common.
    """

    def __init__(
        self, max_known: int = MAX_KNOWN_BLOCKS, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._max_known = max_known
        self._clock = clock
        # By engine name, bounded by `max_known_engines`; the one created first is first.
        self._tables: dict[str, PrefixTable] = {}
        self._least_loaded = LeastLoaded()
        self._turn = 0

    def __len__(self) -> int:
        """Number of known blocks."""
        return sum(map(len, self._tables.values()))

    def choose(self, candidates: Sequence[Replica], hints: RoutingHints) -> Replica | None:
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        blocks = block_checksums(hints.prompt(MAX_PROMPT_BYTES))
        eligible = within_load_bound(candidates)
        if not blocks:
            return self._least_loaded.choose(eligible, hints)
        length = prefix_bytes(len(blocks))
        options = self._list_options(candidates, eligible, blocks, length)
        chosen = _select(options, length, lambda: self._rank_for_new(eligible, blocks))
        _, _, _, cached, replica = chosen
        hints.uncached_tokens = (length - cached) // BYTES_PER_TOKEN
        self._remember(replica, blocks)
        return replica

    def _list_options(
        self,
        candidates: Sequence[Replica],
        eligible: Sequence[Replica],
        blocks: Sequence[int],
        length: int,
    ) -> list[Option]:
        now = self._clock()
        self._turn += 1
        start = self._turn % len(eligible)
        options: list[Option] = []
        for turn, replica in enumerate((*eligible[start:], *eligible[:start])):
            cached = prefix_bytes(self._table(replica, candidates).count_known(blocks))
            wait_s = replica.prefill.wait_s(now, (length - cached) // BYTES_PER_TOKEN)
            load = replica.in_flight * replica.weight + replica.offset
            options.append((wait_s, load, turn, cached, replica))
        return options

    def _rank_for_new(self, eligible: Sequence[Replica], blocks: Sequence[int]) -> list[Replica]:
        """Return the replicas in the order for a prompt of which none has cached anything."""
        if all(replica.weight == 1 for replica in eligible):  # no other gateway is known
            fullness = {r: self._tables[r.engine.name].fullness for r in eligible}
            most = min(fullness.values()) + EVENLY
            eligible = [replica for replica in eligible if fullness[replica] <= most]
        return rank_by_rendezvous(eligible, b"%d" % blocks[0])

    def _table(self, replica: Replica, candidates: Sequence[Replica]) -> PrefixTable:
        """Return the table of an engine, an empty one if the engine is another than before."""
        name, since = replica.engine.name, replica.engine.since
        table = self._tables.get(name)
        if table is None:
            if len(self._tables) >= max_known_engines(candidates):
                present = {candidate.engine.name for candidate in candidates}
                del self._tables[next(name for name in self._tables if name not in present)]
            table = self._tables[name] = PrefixTable(since)
        elif table.since != since and replica.engine.state is EngineState.READY:
            table = self._tables[name] = PrefixTable(since)
        return table

    def _remember(self, replica: Replica, blocks: Sequence[int]) -> None:
        facts = replica.engine.facts
        tokens = facts.kv_cache_tokens or DEFAULT_KV_TOKENS
        tokens *= facts.data_parallel_size or 1
        table = self._tables[replica.engine.name]
        table.remember(blocks, tokens * BYTES_PER_TOKEN)
        # No more than the prompt has added: no request forgets a whole table.
        while (excess := len(self) - self._max_known) > 0:
            max(self._tables.values(), key=len).forget(excess)


def _select(
    options: Sequence[Option], length: int, rank_for_new: Callable[[], Sequence[Replica]]
) -> Option:
    """Return the option for a prompt of this length."""
    soonest, most = min(options), max(option[3] for option in options)
    if most:
        budget_s = BUDGET_S if most >= MOSTLY * length else 0.0
        enough = min(most, MOSTLY * length)
        chosen = min(option for option in options if option[3] >= enough)
        if _is_soon(chosen, soonest, chosen[3] - soonest[3], budget_s):
            return chosen
        return soonest
    by_replica = {option[4]: option for option in options}
    for replica in rank_for_new():
        # Another gateway may have had it computed there.
        if _is_soon(by_replica[replica], soonest, length // 2, BUDGET_S):
            return by_replica[replica]
    return soonest


def _is_soon(option: Option, soonest: Option, saved: int, budget_s: float) -> bool:
    """Return whether an option that saves the computing of so many bytes is soon enough."""
    saved_s = saved / BYTES_PER_TOKEN / soonest[4].prefill.rate
    return option[0] <= soonest[0] + saved_s + budget_s
