"""Simulates users who chat with replicas that have prefix caches, to compare routing policies.

Time is simulated. A replica prefills the uncached part of one prompt after another, then decodes;
its cache holds a number of blocks and evicts the least recently used, as in vLLM. Not modeled:
batched prefills, and requests that slow down each other's decoding.
"""

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles

from app.routing.policies import SelectionPolicy
from app.routing.replica import Replica
from tests.app.routing.fakes import FakeEngine, FakeHints

# vLLM's blocks are 16 tokens, 64 bytes of English; larger ones make the simulation quicker.
BLOCK_BYTES = 256
BYTES_A_TOKEN = 4
PREFILL_TOKENS_PER_S = 8000.0
TOKENS_PER_S = 40.0


@dataclass
class Request(FakeHints):
    """A request with its hints and the length of its answer."""

    answer_bytes: int = 0


@dataclass
class Traffic:
    """Users who arrive at random, chat for some turns, and think in between."""

    users_per_s: float
    turns: int
    # Number and length of the prefixes (system prompts, documents) that they share.
    shared: int
    shared_bytes: int
    message_bytes: int = 400
    answer_bytes: int = 800
    think_s: float = 8.0
    # Zipf exponent of the popularity of the shared prefixes.
    skew: float = 1.0


@dataclass
class Cache:
    """The prefix cache of a replica."""

    most: int
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def take(self, text: bytes) -> int:
        """Return the number of cached bytes of a prompt, and cache all of it."""
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
    """Result of a run."""

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
    """Return the result of a number of requests.

    `policies` has one for each gateway; gateways take turns and see only their own requests.
    """
    chance = random.Random(seed)
    engines = [FakeEngine(f"demo-{n}") for n in range(replicas)]
    fleets = [[Replica(engine, "demo") for engine in engines] for _ in policies]
    caches = {engine.name: Cache(cache_bytes // BLOCK_BYTES) for engine in engines}
    idle_at = dict.fromkeys(caches, 0.0)
    prefixes = [chance.randbytes(traffic.shared_bytes) for _ in range(traffic.shared)]
    odds = [1 / (n + 1) ** traffic.skew for n in range(traffic.shared)]
    served = Counter[str]()
    events: list[tuple[float, int, Iterator[Request] | Replica]] = []
    order = 0

    def at(moment: float, what: Iterator[Request] | Replica) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (moment, order, what))

    def user(number: int) -> Iterator[Request]:
        text = chance.choices(prefixes, odds)[0]
        for _ in range(traffic.turns):
            text += chance.randbytes(round(chance.uniform(0.3, 1.7) * traffic.message_bytes))
            size = round(chance.uniform(0.3, 1.7) * traffic.answer_bytes)
            yield Request(str(number).encode(), text, size)
            text += chance.randbytes(size)

    moment = 0.0
    for asker in range(requests // traffic.turns):
        moment += chance.expovariate(traffic.users_per_s)
        at(moment, user(asker))
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
