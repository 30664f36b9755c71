"""Simulates a published benchmark of routing by prefixes, for each of our policies.

150 groups share a prefix of 6,000 tokens, each has 5 prompts of 1,200 tokens more, an answer has
1,000 tokens, and requests arrive at random, 3 to 60 a second in stages of which each ends when its
last request has. 8 replicas have 307,328 tokens of KV cache each: together 1.4 times the 750
prompts. (llm-d's guides on scheduling; 16 H100, Qwen3-32B.)

    python -m tests.app.routing.shared_prefixes [POLICY…]     prints a row for each
"""

import heapq
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, quantiles

from app.routing import POLICIES, Prefill, SelectionPolicy
from app.routing.prefix_affinity import PrefixAffinity
from app.routing.replica import Replica
from engines.base import EngineFacts
from tests.app.routing.batched_engine import BLOCK_TOKENS, BatchedEngine, Job
from tests.app.routing.fakes import FakeEngine, FakeHints
from tests.app.routing.simulation import BYTES_A_TOKEN, Clock

GROUPS, PROMPTS, PREFIX_TOKENS, PROMPT_TOKENS, ANSWER_TOKENS = 150, 5, 6000, 1200, 1000
REPLICAS, KV_TOKENS = 8, 307_328
# Requests a second, and seconds. The first stage fills the caches and does not count.
STAGES = (
    (15, 50), (3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25), (35, 21),
    (40, 38), (43, 36), (46, 33), (49, 30), (52, 29), (55, 27), (57, 26), (60, 25),
)  # fmt: skip


@dataclass
class StageResult:
    """One stage: its requests, until the last one has ended."""

    rate: int
    seconds: float
    answers: int
    ttfts_s: list[float]
    hit_ratio: float  # of prompt tokens, of requests when they start
    preemptions: int

    @property
    def tokens_per_s(self) -> float:
        return self.answers * ANSWER_TOKENS / self.seconds


class Benchmark:
    """The replicas behind one gateway."""

    def __init__(self, policy: SelectionPolicy, clock: Clock, seed: int = 1) -> None:
        self._policy = policy
        self._clock = clock
        self._chance = random.Random(seed)
        facts = EngineFacts(kv_cache_tokens=KV_TOKENS)
        names = [f"demo-{number}" for number in range(REPLICAS)]
        self._replicas = [Replica(FakeEngine(name), "demo") for name in names]
        for replica in self._replicas:
            replica.engine.facts = facts  # type: ignore[misc]
        self._engines = {replica: BatchedEngine(KV_TOKENS) for replica in self._replicas}
        self._texts = [self._random_text(PREFIX_TOKENS) for _ in range(GROUPS)]
        self._ends = [self._random_text(PROMPT_TOKENS) for _ in range(GROUPS * PROMPTS)]
        # A request arrives (None), or a step of a replica ends.
        self._events: list[tuple[float, int, Replica | None]] = []
        self._order = 0
        self._stepping: set[Replica] = set()

    def _random_text(self, tokens: int) -> bytes:
        return self._chance.randbytes(tokens * BYTES_A_TOKEN)

    def run(self, rate: int, seconds: float) -> StageResult:
        """Run one stage to the end of its last request."""
        began, ttfts, jobs = self._clock.now, list[float](), list[Job]()
        before = self._preemptions
        arrival = began
        while (arrival := arrival + self._chance.expovariate(rate)) < began + seconds:
            self._at(arrival, None)
        while self._events:
            self._clock.now, _, replica = heapq.heappop(self._events)
            if replica is None:
                self._send(ttfts, jobs)
                continue
            self._stepping.discard(replica)
            self._engines[replica].end_step(self._clock.now)
            self._step(replica)
        cached = sum(job.cached or 0 for job in jobs)
        return StageResult(
            rate,
            self._clock.now - began,
            len(jobs),
            ttfts,
            cached / sum(len(job.blocks) for job in jobs),
            self._preemptions - before,
        )

    @property
    def _preemptions(self) -> int:
        return sum(engine.preemptions for engine in self._engines.values())

    def _at(self, moment: float, replica: Replica | None) -> None:
        self._order += 1
        heapq.heappush(self._events, (moment, self._order, replica))

    def _send(self, ttfts: list[float], jobs: list[Job]) -> None:
        now = self._clock.now
        number = self._chance.randrange(GROUPS * PROMPTS)
        group = number // PROMPTS
        hints = FakeHints(b"%d" % number, self._texts[group] + self._ends[number])
        chosen = self._policy.choose(self._replicas, hints)
        assert chosen is not None
        chosen.in_flight += 1
        # By name: the first blocks are those of the group.
        shared = PREFIX_TOKENS // BLOCK_TOKENS
        blocks = [group * 1000 + n for n in range(shared)]
        blocks += [10**6 + number * 1000 + n for n in range(PROMPT_TOKENS // BLOCK_TOKENS)]
        prefill = chosen.prefill.begin(now, hints.uncached_tokens, observed=True)
        jobs.append(
            Job(
                blocks,
                ANSWER_TOKENS,
                partial(self._first_token, now, prefill, ttfts),
                partial(self._end, chosen),
            )
        )
        self._engines[chosen].submit(jobs[-1])
        self._step(chosen)

    def _step(self, replica: Replica) -> None:
        """Begin a step, unless one is under way or there is nothing to do."""
        engine = self._engines[replica]
        if engine.busy and replica not in self._stepping:
            self._stepping.add(replica)
            self._at(engine.begin_step(self._clock.now), replica)

    def _first_token(self, sent: float, prefill: Prefill, ttfts: list[float], now: float) -> None:
        prefill.first_token(now)
        ttfts.append(now - sent)

    def _end(self, replica: Replica, _now: float) -> None:
        replica.in_flight -= 1


def make(name: str) -> Benchmark:
    """Return the benchmark of a policy by its name."""
    clock = Clock()
    made = POLICIES[name]
    policy = PrefixAffinity(clock=clock) if made is PrefixAffinity else made()
    return Benchmark(policy, clock)


def row(name: str, results: Sequence[StageResult]) -> str:
    """Return a row of a Markdown table on some stages together."""
    answers = sum(result.answers for result in results)
    tokens_per_s = answers * ANSWER_TOKENS / sum(result.seconds for result in results)
    ttfts = [ttft for result in results for ttft in result.ttfts_s]
    hits = sum(result.hit_ratio * result.answers for result in results) / answers
    return (
        f"| `{name}` | {hits:.0%} | {fmean(ttfts):.2f} s | {quantiles(ttfts, n=10)[-1]:.2f} s "
        f"| {tokens_per_s:,.0f} | {results[-1].tokens_per_s:,.0f} "
        f"| {sum(result.preemptions for result in results):,} |"
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or POLICIES:
        benchmark = make(name)
        print(row(name, [benchmark.run(*stage) for stage in STAGES][1:]), flush=True)
