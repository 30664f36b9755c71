"""Replicas with prefix caches, and people who chat with them: what a routing policy makes of both.

Time is simulated. A replica computes the part of a prompt that it has not cached, one prompt after
another, and then answers; its cache holds a number of blocks, the least recently used leave first,
as in vLLM. What is left out: batching of prefills, and answers that slow each other down.
"""

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles

from app.routing.policies import SelectionPolicy
from app.routing.replica import Replica
from tests.app.routing.fakes import FakeClues, FakeEngine

# vLLM's blocks are 16 tokens, 64 bytes of English; larger ones make the simulation quicker.
BLOCK_BYTES = 256
BYTES_A_TOKEN = 4
PREFILL_TOKENS_PER_S = 8000.0
TOKENS_PER_S = 40.0


@dataclass
class Request(FakeClues):
    """What a policy sees of a request, and what it takes."""

    answer_bytes: int = 0


@dataclass
class Traffic:
    """People who come at random, chat for some turns, and think in between."""

    people_per_s: float
    turns: int
    # How many beginnings (system prompts, documents) they share, and how long those are.
    shared: int
    shared_bytes: int
    message_bytes: int = 400
    answer_bytes: int = 800
    think_s: float = 8.0
    # How much more often the first of the shared beginnings comes than the second, third…
    skew: float = 1.0


@dataclass
class Cache:
    """Blocks that a replica has computed."""

    most: int
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def take(self, text: bytes) -> int:
        """Return how many bytes of a prompt were there; all of it is from now on."""
        last, found, miss = 0, 0, False
        chain: list[int] = []
        for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
            last = hash((last, text[start : start + BLOCK_BYTES]))
            chain.append(last)
            miss = miss or last not in self.blocks
            found += 0 if miss else BLOCK_BYTES
        for block in reversed(chain):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.most:
            self.blocks.popitem(last=False)
        return found


@dataclass
class Outcome:
    """What came of a run."""

    hit_ratio: float  # of prompt bytes
    ttft_mean_s: float
    ttft_p95_s: float
    busiest: float  # the busiest replica's requests over the mean

    def __str__(self) -> str:
        return (
            f"{self.hit_ratio:4.0%} of the prompt cached, TTFT {self.ttft_mean_s * 1000:5.0f} ms "
            f"(p95 {self.ttft_p95_s * 1000:5.0f}), busiest replica {self.busiest:.2f} of the mean"
        )


def simulate(
    policies: Sequence[SelectionPolicy],
    traffic: Traffic,
    *,
    replicas: int = 4,
    cache_bytes: int = 2**21,
    requests: int = 2000,
    seed: int = 1,
) -> Outcome:
    """Return what becomes of so many requests.

    `policies` are those of gateways that take turns, each of which sees its own requests alone.
    """
    chance = random.Random(seed)
    engines = [FakeEngine(f"demo-{n}") for n in range(replicas)]
    fleets = [[Replica(engine, "demo") for engine in engines] for _ in policies]
    caches = {engine.name: Cache(cache_bytes // BLOCK_BYTES) for engine in engines}
    idle_at = dict.fromkeys(caches, 0.0)
    beginnings = [chance.randbytes(traffic.shared_bytes) for _ in range(traffic.shared)]
    odds = [1 / (n + 1) ** traffic.skew for n in range(traffic.shared)]
    served = Counter[str]()
    events: list[tuple[float, int, Iterator[Request] | Replica]] = []
    number = 0

    def at(moment: float, what: Iterator[Request] | Replica) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (moment, number, what))

    def person(asker: int) -> Iterator[Request]:
        text = chance.choices(beginnings, odds)[0]
        for _ in range(traffic.turns):
            text += chance.randbytes(round(chance.uniform(0.3, 1.7) * traffic.message_bytes))
            size = round(chance.uniform(0.3, 1.7) * traffic.answer_bytes)
            yield Request(str(asker).encode(), text, size)
            text += chance.randbytes(size)

    moment = 0.0
    for asker in range(requests // traffic.turns):
        moment += chance.expovariate(traffic.people_per_s)
        at(moment, person(asker))
    cached = total = 0
    waits: list[float] = []
    while events:
        now, _, what = heapq.heappop(events)
        if isinstance(what, Replica):
            what.in_flight -= 1
            continue
        request = next(what, None)
        if request is None:
            continue
        gateway = len(waits) % len(policies)
        replica = policies[gateway].choose(fleets[gateway], request)
        assert replica is not None
        name = replica.engine.name
        found = caches[name].take(request.text)
        cached, total = cached + found, total + len(request.text)
        missed_s = (len(request.text) - found) / BYTES_A_TOKEN / PREFILL_TOKENS_PER_S
        idle_at[name] = max(idle_at[name], now) + missed_s
        ends = idle_at[name] + request.answer_bytes / BYTES_A_TOKEN / TOKENS_PER_S
        waits.append(idle_at[name] - now)
        replica.in_flight += 1
        served[name] += 1
        at(ends, replica)
        at(ends + chance.expovariate(1 / traffic.think_s), what)
    mean = len(waits) / replicas
    return Outcome(
        cached / total,
        fmean(waits),
        quantiles(waits, n=20)[-1],
        max(served.values()) / mean,
    )
