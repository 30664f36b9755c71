"""Selection by what the engines have cached: the policy `prefix`.

A request goes to the replica that has cached the most of its prompt, and among several to the one
that will have computed the rest first. It goes elsewhere where that would be sooner by more than
BUDGET_S and the time that it takes to compute the cached part anew, or where the replica is above
the load bound: a system prompt that all clients send must not keep one replica busy while others
idle. A prompt of which little is cached has no such budget. One of which nothing is cached goes
where every gateway would send it; a gateway alone does so only among the caches that are the least
full.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

from app.routing.least_loaded import LeastLoaded
from app.routing.prefix_table import MAX_PROMPT_BYTES, PrefixTable, block_checksums, prefix_bytes
from app.routing.replica import Replica
from app.routing.selection import (
    ReportedTokens,
    RoutingHints,
    max_known_engines,
    rank_by_rendezvous,
    within_load_bound,
)
from engines.base import EngineState

# Share of a prompt that a replica has to have cached for the prompt to wait for it.
MIN_KEPT = 0.3
# Seconds for which a prompt waits for a replica that has cached it, beyond what it costs to compute
# it elsewhere, where it would take the place of other prompts in the cache. Waits are estimates:
# with one second, conversations moved between real engines for a difference that was none.
BUDGET_S = 3.0
# Share of a prompt that an engine has to report as cached, of what was believed to be.
STILL_CACHED = 0.8
# How much fuller, as a share of its size, the cache may be that gets a new prompt. Gateways that do
# not know of each other agree on an engine the more often, the larger it is.
EVENLY = 0.1
# English in JSON. The tokens in flight go by it, and the tables' size before anything is learned.
BYTES_PER_TOKEN = 4
# A ratio outside of these is an image or a fault, and no text.
MIN_RATIO, MAX_RATIO = 1.0, 16.0
# What an earlier response counts compared with the one after it: about the last ten do.
DECAY = 0.9
# Bound of the tables: 262144 blocks take 44 MiB of memory. The largest table gives way.
MAX_KNOWN_BLOCKS = 262144
# Size of the table of an engine that does not report how much its KV cache holds, in tokens.
DEFAULT_KV_TOKENS = 2_000_000

# The expected wait, the load, the turn, and the bytes that are cached; then the replica, its table,
# and what that knows of the prompt. Options are compared, and no two have the same turn.
Option = tuple[float, int, int, int, Replica, PrefixTable, int, int]


class _SentPrompt(NamedTuple):
    """A prompt that an engine was sent, and what was known of it before."""

    replica: Replica
    table: PrefixTable
    blocks: Sequence[int]
    size: int  # its bytes
    known: int  # bytes of it that were cached
    answer: int  # bytes behind them that were cached if they are the answer to the prompt before


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
        self._ratio = float(BYTES_PER_TOKEN)  # of prompts, as the engines count their tokens
        # Sums of the latest next turns: bytes of answers, and those of them that were cached.
        self._answers = self._repeated = 0.0

    def __len__(self) -> int:
        """Number of known blocks and tails."""
        return sum(map(len, self._tables.values()))

    def choose(self, candidates: Sequence[Replica], hints: RoutingHints) -> Replica | None:
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        prompt = hints.prompt(MAX_PROMPT_BYTES)
        blocks = block_checksums(prompt)
        eligible = within_load_bound(candidates, hints.slots)
        if not blocks:
            return self._least_loaded.choose(eligible, hints)
        length = prefix_bytes(len(blocks))
        options = self._list_options(candidates, eligible, blocks, length)
        chosen = _select(options, length, lambda: self._rank_for_new(eligible, blocks))
        _, _, _, cached, replica, table, known, answer = chosen
        hints.uncached_tokens = (length - cached) // BYTES_PER_TOKEN
        sent = _SentPrompt(replica, table, blocks, len(prompt), known, answer)
        self._remember(replica, table, blocks)
        hints.on_end = partial(self._note_end, sent)
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
        repeats = self._repeats
        options: list[Option] = []
        for turn, replica in enumerate((*eligible[start:], *eligible[:start])):
            table = self._table(replica, candidates)
            known, answer = table.find(blocks)
            cached = known + int(answer * repeats)
            wait_s = replica.prefill.wait_s(now, (length - cached) // BYTES_PER_TOKEN)
            load = replica.in_flight * replica.weight + replica.offset
            options.append((wait_s, load, turn, cached, replica, table, known, answer))
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

    def _note_end(self, sent: _SentPrompt, tokens: ReportedTokens | None) -> None:
        """Learn from the end of a request."""
        if self._tables.get(sent.replica.engine.name) is not sent.table:
            return  # the engine has restarted
        answer = 0
        if tokens is not None and tokens.prompt > 0 and sent.size < MAX_PROMPT_BYTES:
            ratio = min(max(sent.size / tokens.prompt, MIN_RATIO), MAX_RATIO)
            self._ratio += (1 - DECAY) * (ratio - self._ratio)
            answer = int(tokens.answer * ratio)
            cached = tokens.cached * ratio
            # Where the prompt before was evicted, nothing is learned of its answer.
            if sent.answer and cached >= STILL_CACHED * sent.known:
                found = min(max(cached - sent.known, -sent.answer), 2 * sent.answer)
                self._repeated = self._repeated * DECAY + found
                self._answers = self._answers * DECAY + sent.answer
        rest = sent.size - prefix_bytes(len(sent.blocks))
        self._remember(sent.replica, sent.table, sent.blocks, (rest, answer))

    @property
    def _repeats(self) -> float:
        """Share of an answer that the engines find cached in the next turn, as they report.

        Chat templates that leave out an answer's thoughts, or write it otherwise than the model
        did, make it 0.
        """
        return min(max(self._repeated / self._answers, 0.0), 1.0) if self._answers else 0.0

    def _remember(
        self,
        replica: Replica,
        table: PrefixTable,
        blocks: Sequence[int],
        tail: tuple[int, int] | None = None,
    ) -> None:
        facts = replica.engine.facts
        tokens = facts.kv_cache_tokens or DEFAULT_KV_TOKENS
        tokens *= facts.data_parallel_size or 1
        table.remember(blocks, int(tokens * self._ratio), tail)
        # No more than the prompt has added: no request forgets a whole table.
        while (excess := len(self) - self._max_known) > 0:
            max(self._tables.values(), key=len).forget(excess)


def _select(
    options: Sequence[Option], length: int, rank_for_new: Callable[[], Sequence[Replica]]
) -> Option:
    """Return the option for a prompt of this length."""
    soonest, most = min(options), max(option[3] for option in options)
    if most:
        budget_s = BUDGET_S if most >= MIN_KEPT * length else 0.0
        chosen = min(option for option in options if option[3] == most)
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
