"""Three gateways with and without shared load in front of four engines, beside one gateway.

    python -m bench.sharing [--rounds 2] [--seconds 3]

Real gateways and a real Redis; the engines are in this process (`sharing_engine.py`), so that the
requests in flight are counted where they are. Then one of three gateways is killed. Takes about two
minutes and writes its section of bench/RESULTS.md.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import NamedTuple

import httpx
from rich.console import Console

from bench.children import Child, terminated_like_interrupted
from bench.peers import KEY, gateway, redis_server
from bench.report import Table, replace_section
from bench.sharing_engine import Engine
from bench.terminal import show

RESULTS = Path(__file__).with_name("RESULTS.md")
TITLE = "Several gateways"
ENGINES = 4
POLICIES = ("least_loaded", "prefix", "session")
# Of the traffic: sessions begin at random, and every tenth is a program with six requests at once.
SESSIONS_PER_S = 12.0
TURNS = 4
HOT_EVERY, HOT_PARALLEL = 10, 6
PREFIXES, PREFIX_CHARS, MESSAGE_CHARS = 16, 4096, 400
THINK_S, DECODE_S = 0.5, 0.5
LETTERS = "abcdefghijklmnopqrstuvwxyz "
WARM_UP_S = 1.5
SAMPLE_S = 0.01
# Slots per engine while a gateway is killed: 12 of the 36 are one gateway's.
SLOTS = 9
TAKEOVER_S = 10.0


@dataclass(frozen=True, slots=True)
class Way:
    """Gateways of one measurement."""

    name: str
    gateways: int
    shared: bool


WAYS = (
    Way("one", 1, shared=False),
    Way("three, nothing shared", 3, shared=False),
    Way("three, load shared", 3, shared=True),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One way with one policy."""

    way: str
    policy: str
    imbalance: float  # mean coefficient of variation of the requests in flight over the engines
    hit_ratio: float  # of prompt characters
    requests: int
    mean_s: float  # beyond the decoding

    @property
    def row(self) -> list[str]:
        """The row of the table."""
        return [
            f"{self.policy}, {self.way}",
            f"{self.imbalance:.2f}",
            f"{self.hit_ratio:.0%}",
            f"{self.mean_s * 1000:.0f}",
            str(self.requests),
        ]


@dataclass(frozen=True, slots=True)
class Takeover:
    """What the others did after the SIGKILL of a gateway, in seconds since then."""

    load_s: float
    slots_s: float
    in_flight: tuple[int, int]  # of one of the others with a full queue, before and after


def table(results: Sequence[Result], takeover: Takeover, rounds: int) -> Table:
    """Return the section of the results."""
    before, after = takeover.in_flight
    return Table(
        TITLE,
        ["", "imbalance", "prompt cached", "added ms", "requests"],
        [result.row for result in results],
        f"{ENGINES} engines with prefix caches, sessions of {TURNS} turns, {SESSIONS_PER_S:g} new "
        f"ones a second, every tenth with {HOT_PARALLEL} requests at once; each stays with the "
        "gateway to which it connected. The imbalance is the coefficient of variation of the "
        "requests in flight over the engines, as the engines count them, every 10 ms; added is the "
        f"mean of what a request takes beyond its decoding. {rounds} rounds with the same sessions "
        "for all: the mean of the imbalance, the median of the time. One of three gateways was "
        f"killed with SIGKILL under load: {takeover.load_s:.1f} s later the others no longer "
        "counted its requests, "
        f"{takeover.slots_s:.1f} s later they had divided its slots (`queue.max_in_flight` "
        f"{SLOTS}), and one with a full queue went from {before} to {after} requests in flight.",
    )


class Session(NamedTuple):
    """A session: when it begins, and what it says."""

    begins_s: float
    name: str
    prefix: str
    parallel: int
    gateway: float  # from 0 to 1, of those that there are


def sessions(seconds: float) -> list[Session]:
    """Return the sessions of every measurement of so many seconds."""
    chance = random.Random(1)
    prefixes = ["".join(chance.choices(LETTERS, k=PREFIX_CHARS)) for _ in range(PREFIXES)]
    odds = [1 / (n + 1) for n in range(PREFIXES)]
    found: list[Session] = []
    now = 0.0
    while now < seconds:
        number = len(found) + 1
        parallel = HOT_PARALLEL if number % HOT_EVERY == 0 else 1
        prefix = chance.choices(prefixes, odds)[0]
        found.append(Session(now, str(number), prefix, parallel, chance.random()))
        now += chance.expovariate(SESSIONS_PER_S)
    return found


class Load:
    """The clients of one measurement."""

    def __init__(self, urls: Sequence[str], model: str, client: httpx.AsyncClient) -> None:
        self._urls = urls
        self._model = model
        self._client = client
        self.added_s: list[float] = []
        self.failed = 0

    async def run(self, seconds: float) -> None:
        """Begin sessions for so long; return when their last requests have ended."""
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for session in sessions(seconds):
                for branch in range(session.parallel):
                    tasks.create_task(self._talk(session, branch, began, seconds))

    async def _talk(self, session: Session, branch: int, began: float, seconds: float) -> None:
        chance = random.Random(f"{session.name}-{branch}")
        loop = asyncio.get_running_loop()
        url = self._urls[int(session.gateway * len(self._urls))]
        messages = [{"role": "system", "content": session.prefix}]
        headers = {"authorization": f"Bearer {KEY}", "x-session-id": session.name}
        await asyncio.sleep(began + session.begins_s - loop.time())
        for _ in range(TURNS):
            if loop.time() >= began + seconds:
                return
            messages.append({"role": "user", "content": chance.randbytes(MESSAGE_CHARS // 2).hex()})
            decode_s = chance.uniform(0.3, 1.7) * DECODE_S
            body = {"model": self._model, "messages": messages, "decode_s": decode_s}
            sent = loop.time()
            answer = await self._client.post(
                f"{url}/v1/chat/completions", json=body, headers=headers
            )
            self.added_s.append(loop.time() - sent - decode_s)
            self.failed += answer.status_code != 200
            messages.append({"role": "assistant", "content": "x" * MESSAGE_CHARS})
            await asyncio.sleep(chance.expovariate(1 / THINK_S))


async def _measure(
    way: Way, policy: str, urls: Sequence[str], engines: Sequence[Engine], seconds: float
) -> Result:
    for engine in engines:
        engine.forget()
    unevenness: list[float] = []

    async def sample() -> None:
        await asyncio.sleep(WARM_UP_S)
        while True:
            loads = [engine.in_flight for engine in engines]
            if sum(loads) >= len(loads):
                unevenness.append(pstdev(loads) / fmean(loads))
            await asyncio.sleep(SAMPLE_S)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
        load = Load(urls, policy, client)
        sampler = asyncio.create_task(sample())
        try:
            await load.run(WARM_UP_S + seconds)
        finally:
            sampler.cancel()
    if load.failed:
        raise RuntimeError(f"{load.failed} requests failed")
    return Result(
        way.name,
        policy,
        fmean(unevenness),
        sum(one.cached_chars for one in engines) / sum(one.prompt_chars for one in engines),
        len(load.added_s),
        fmean(load.added_s),
    )


async def _take_over(running: Sequence[tuple[Child, str]]) -> Takeover:
    """Kill the last gateway while all have full queues, and watch the first."""
    victim, url = running[-1][0], running[0][1]
    body = {"model": "slots", "messages": [{"role": "user", "content": "x"}], "decode_s": 60.0}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as client:
        headers = {"authorization": f"Bearer {KEY}"}
        tasks = [
            asyncio.create_task(
                client.post(f"{one}/v1/chat/completions", json=body, headers=headers)
            )
            for _, one in running
            for _ in range(2 * SLOTS * ENGINES // len(running))
        ]
        try:
            share = SLOTS * ENGINES // len(running)
            others = share * (len(running) - 1)

            async def until(in_flight: int | None, elsewhere: int | None) -> float:
                began = time.monotonic()
                while True:
                    page = (await client.get(f"{url}/metrics")).text
                    right = (
                        in_flight is None
                        or _sum(page, "gateway_requests_in_flight") > in_flight - 1
                    )
                    known = (
                        elsewhere is None
                        or _sum(page, "gateway_engine_in_flight_elsewhere") == elsewhere
                    )
                    if right and known:
                        return time.monotonic()
                    if time.monotonic() - began > TAKEOVER_S:
                        raise RuntimeError("the slots of a killed gateway were not taken over")
                    await asyncio.sleep(SAMPLE_S)

            await until(share, others)
            os.kill(victim.pid, signal.SIGKILL)
            killed = time.monotonic()
            more = SLOTS * ENGINES // (len(running) - 1)
            slots = asyncio.create_task(until(more, None))
            load_s = await until(None, more)
            return Takeover(load_s - killed, await slots - killed, (share, more))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _sum(page: str, name: str) -> float:
    """Return the sum of a series of the model `slots`."""
    lines = re.findall(rf'^{name}{{(?=[^}}]*model="slots").*}} (\S+)$', page, re.MULTILINE)
    return sum(map(float, lines))


def _models(engines: Sequence[Engine]) -> Iterator[dict[str, object]]:
    """Yield a model for each policy, and one with a limit."""
    urls = [{"kind": "remote", "url": engine.url} for engine in engines]
    for policy in POLICIES:
        yield {"name": policy, "policy": policy, "engines": urls}
    yield {"name": "slots", "queue": {"max_in_flight": SLOTS}, "engines": urls}


async def measure(seconds: float, rounds: int, console: Console) -> tuple[list[Result], Takeover]:
    """Return every figure. Raises StartError.

    All gateways run at the same time, and each round loads one way after the other, every second
    round in reverse order.
    """
    results: list[Result] = []
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine()) for _ in range(ENGINES)]
        models = list(_models(engines))
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children = ExitStack()
        stack.push_async_callback(asyncio.to_thread, children.close)
        redis = children.enter_context(redis_server(home))

        def start(way: Way, number: int) -> tuple[Child, str]:
            own = home / f"{WAYS.index(way)}-{number}"
            own.mkdir()
            redis_url = redis if way.shared else None
            name = f"sharing-{own.name}"
            return children.enter_context(gateway(own, models, name=name, redis_url=redis_url))

        running: dict[Way, list[tuple[Child, str]]] = {}
        for way in WAYS:
            # In threads: the engines that they wait for are in this loop.
            starts = (asyncio.to_thread(start, way, number) for number in range(way.gateways))
            running[way] = await asyncio.gather(*starts)
        for number in range(rounds):
            for policy in POLICIES:
                for way in WAYS[:: -1 if number % 2 else 1]:
                    urls = [url for _, url in running[way]]
                    results.append(await _measure(way, policy, urls, engines, seconds))
                    console.print("  ".join(results[-1].row))
        takeover = await _take_over(running[WAYS[-1]])
    return [_mean(results, way, policy) for policy in POLICIES for way in WAYS], takeover


def _mean(results: Sequence[Result], way: Way, policy: str) -> Result:
    """Return the mean of the rounds, and all their requests."""
    of_both = [one for one in results if (one.way, one.policy) == (way.name, policy)]
    return Result(
        way.name,
        policy,
        fmean(one.imbalance for one in of_both),
        fmean(one.hit_ratio for one in of_both),
        sum(one.requests for one in of_both),
        median(one.mean_s for one in of_both),
    )


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    console = Console(stderr=True)
    with terminated_like_interrupted():
        measured = asyncio.run(measure(options.seconds, options.rounds, console))
    made = table(*measured, options.rounds)
    RESULTS.write_text(replace_section(RESULTS.read_text(), made.markdown()))
    show(made)


if __name__ == "__main__":
    main()
