"""Simulates users who chat with replicas that have prefix caches, to compare routing policies.

Time is simulated. A replica prefills the uncached part of one prompt after another, then decodes;
its cache holds a number of blocks, of answers too, and evicts the least recently used, as in vLLM,
where a request uses its blocks until it ends. Not modeled: batched prefills, and requests that slow
down each other's decoding.
"""

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev, quantiles

from app.routing import Catalogue, Model, Prefill, ReportedTokens, SelectionPolicy
from app.routing.replica import Replica
from app.sharing.gateways import Gateways
from app.sharing.report import LoadReport, State
from app.sharing.shared_engines import SharedEngines
from engines.base import EngineFacts
from tests.app.routing.fakes import FakeEngine, FakeHints

# vLLM's blocks are 16 tokens, 64 bytes of English; larger ones make the simulation quicker.
BLOCK_BYTES = 256
BYTES_A_TOKEN = 4
PREFILL_TOKENS_PER_S = 8000.0
TOKENS_PER_S = 40.0


@dataclass
class Request(FakeHints):
    """A request with its hints and its answer."""

    answer: bytes = b""
    gateway: int | None = None  # that the user is connected to; None: they take turns


@dataclass(frozen=True)
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
    # Every so many users is a program whose session has so many requests at once; 0: none is.
    hot_every: int = 0
    hot_parallel: int = 8
    # Weights of the gateways, to one of which each user stays connected; none: they take turns.
    connected: tuple[float, ...] = ()


@dataclass
class Clock:
    """The simulated time, for policies that have a clock."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


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


class Sharing:
    """The load sharing of one gateway, without Redis."""

    def __init__(self, number: int, fleet: Sequence[Replica]) -> None:
        self._engines = SharedEngines(Catalogue([Model("demo", (), tuple(fleet))]))
        self._engines.refresh()
        self._gateways = Gateways(f"{number:016x}")
        self._gateways.set_own_engines(self._engines.keys())
        self._sequence = 0

    def report(self) -> LoadReport:
        """Return the gateway's next report."""
        self._sequence += 1
        id_ = self._gateways.own_id
        return LoadReport(1, id_, State.SERVING, self._sequence, self._engines.counts())

    def receive(self, report: LoadReport, now: float) -> None:
        """Hear a report of any gateway."""
        if report.gateway == self._gateways.own_id:
            self._gateways.receive_own(now)
        else:
            self._gateways.receive(report, now, self._engines.counts())
        self._engines.apply_loads(self._gateways)
        self._engines.apply_divisions(self._gateways)


@dataclass
class End:
    """The end of a request at a replica, which reports its tokens."""

    request: Request
    replica: Replica
    tokens: ReportedTokens


# A user's next request, a first token, the end of a request, a report that is due, or one on its
# way.
Happening = Iterator[Request] | Prefill | End | Sharing | LoadReport


@dataclass
class Outcome:
    """Result of a run."""

    hit_ratio: float  # of prompt bytes
    ttft_mean_s: float
    ttft_p95_s: float
    busiest: float  # the busiest replica's requests over the mean
    # Coefficient of variation of the requests in flight over the replicas, mean over the arrivals.
    imbalance: float

    def __str__(self) -> str:
        return (
            f"{self.hit_ratio:4.0%} of the prompt cached, TTFT {self.ttft_mean_s * 1000:5.0f} ms "
            f"(p95 {self.ttft_p95_s * 1000:5.0f}), busiest replica {self.busiest:.2f} of the mean, "
            f"imbalance {self.imbalance:.2f}"
        )


def simulate(
    policies: Sequence[SelectionPolicy],
    traffic: Traffic,
    *,
    clock: Clock | None = None,
    replicas: int = 4,
    cache_bytes: int = 2**21,
    requests: int = 2000,
    seed: int = 1,
    report_s: float | None = None,
    delay_s: float = 0.002,
) -> Outcome:
    """Return the result of a number of requests.

    `policies` has one for each gateway; gateways take turns. They see only their own requests, and
    those of the others as reported every `report_s` seconds and received `delay_s` later. `clock`
    is the one that the policies have.
    """
    clock = clock or Clock()
    chance, links = random.Random(seed), random.Random(seed)
    facts = EngineFacts(kv_cache_tokens=cache_bytes // BYTES_A_TOKEN)
    names = [f"demo-{number}" for number in range(replicas)]
    engines = [FakeEngine(name, shared_id=name, facts=facts) for name in names]
    fleets = [[Replica(engine, "demo") for engine in engines] for _ in policies]
    sharing = [Sharing(number, fleet) for number, fleet in enumerate(fleets)]
    caches = {engine.name: Cache(cache_bytes // BLOCK_BYTES) for engine in engines}
    idle_at = dict.fromkeys(caches, 0.0)
    prefixes = [chance.randbytes(traffic.shared_bytes) for _ in range(traffic.shared)]
    odds = [1 / (n + 1) ** traffic.skew for n in range(traffic.shared)]
    served = Counter[str]()
    events: list[tuple[float, int, Happening]] = []
    order = pending = 0  # pending: events that are not reports

    def at(moment: float, what: Happening) -> None:
        nonlocal order, pending
        order += 1
        pending += not isinstance(what, LoadReport | Sharing)
        heapq.heappush(events, (moment, order, what))

    def user(number: int, prefix: bytes | None = None) -> Iterator[Request]:
        text = prefix or chance.choices(prefixes, odds)[0]
        gateway = None
        if traffic.connected:
            numbers = range(len(policies))
            gateway = links.choices(numbers, traffic.connected[: len(policies)])[0]
        for _ in range(traffic.turns):
            text += chance.randbytes(round(chance.uniform(0.3, 1.7) * traffic.message_bytes))
            answer = chance.randbytes(round(chance.uniform(0.3, 1.7) * traffic.answer_bytes))
            yield Request(str(number).encode(), text, answer, gateway)
            text += answer

    moment = 0.0
    for asker in range(requests // traffic.turns):
        moment += chance.expovariate(traffic.users_per_s)
        if traffic.hot_every and asker % traffic.hot_every == 0:
            prefix = chance.choices(prefixes, odds)[0]
            for _ in range(traffic.hot_parallel):
                at(moment, user(asker, prefix))
        else:
            at(moment, user(asker))
    if report_s is not None:
        for one in sharing:
            at(chance.uniform(0, report_s), one)
    cached = total = 0
    waits: list[float] = []
    unevenness: list[float] = []
    while pending:
        clock.now, _, what = heapq.heappop(events)
        now = clock.now
        pending -= not isinstance(what, LoadReport | Sharing)
        if isinstance(what, Prefill):
            what.first_token(now)
            continue
        if isinstance(what, End):
            ended = what.request
            what.replica.in_flight -= 1
            caches[what.replica.engine.name].take(ended.text + ended.answer)
            if ended.on_end is not None:
                ended.on_end(what.tokens)
            continue
        if isinstance(what, Sharing):
            assert report_s is not None
            at(now + delay_s, what.report())
            at(now + report_s, what)
            continue
        if isinstance(what, LoadReport):
            for one in sharing:
                one.receive(what, now)
            continue
        request = next(what, None)
        if request is None:
            continue
        gateway = len(waits) % len(policies) if request.gateway is None else request.gateway
        chosen = policies[gateway].choose(fleets[gateway], request)
        assert chosen is not None
        loads = [sum(column) for column in zip(*map(_loads, fleets), strict=True)]
        if sum(loads) >= replicas:
            unevenness.append(pstdev(loads) / fmean(loads))
        name = chosen.engine.name
        found = caches[name].take(request.text)
        cached, total = cached + found, total + len(request.text)
        missed_s = (len(request.text) - found) / BYTES_A_TOKEN / PREFILL_TOKENS_PER_S
        idle_at[name] = max(idle_at[name], now) + missed_s
        ends = idle_at[name] + len(request.answer) / BYTES_A_TOKEN / TOKENS_PER_S
        waits.append(idle_at[name] - now)
        chosen.in_flight += 1
        prefill = chosen.prefill.begin(now, request.uncached_tokens, observed=True)
        at(idle_at[name], prefill)
        served[name] += 1
        sizes = (len(request.text), found, len(request.answer))
        tokens = ReportedTokens(*(size // BYTES_A_TOKEN for size in sizes))
        at(ends, End(request, chosen, tokens))
        at(ends + chance.expovariate(1 / traffic.think_s), what)
    mean = len(waits) / replicas
    return Outcome(
        cached / total,
        fmean(waits),
        quantiles(waits, n=20)[-1],
        max(served.values()) / mean,
        fmean(unevenness),
    )


def _loads(fleet: Sequence[Replica]) -> list[int]:
    return [replica.in_flight for replica in fleet]
