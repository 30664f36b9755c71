"""The soak test: a long mixture of valid, faulty and impatient clients, then checks for leaks.

    python -m bench.soak [--minutes 10] [--clients 48] [--seed 1]

Writes its section of bench/RESULTS.md, or of .bench/RESULTS.md when it was shorter than five
minutes. Exit code 1 when something is left open, a good request failed or any did not end.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import yaml
from rich.console import Console

from bench import proc
from bench.children import (
    WORK,
    Child,
    StartError,
    child,
    environment,
    free_port,
    terminated_like_interrupted,
    wait_until,
)
from bench.figures import slope
from bench.peers import KEY, answers, configuration, stub
from bench.report import Table, number, replace_section
from bench.scenarios import ALWAYS_WHOLE, FAST, FAULTY, NO_END, PACED, PATIENCE_S, Client, play
from bench.soak_gateway import Leftovers
from bench.terminal import show

RESULTS = Path(__file__).with_name("RESULTS.md")
WORTH_KEEPING_MIN = 5.0
# Memory settles in the first minute: pools, caches, the allocator's arenas.
SETTLED_S = 60.0
PAUSE_S = 0.05
MAX_REQUESTS = 500_000
QUICK = {"connect_s": 1.0, "first_byte_s": 0.5, "stall_s": 0.5}


@dataclass(slots=True)
class Soaked:
    """Results of the soak test. Memory in KiB, by seconds since the start."""

    minutes: float
    clients: int
    seed: int
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    rss: list[tuple[float, int]] = field(default_factory=list)
    leftovers: Leftovers | None = None

    # IDs of requests that did not end in time, to find them in the gateway's log.
    unfinished: list[str] = field(default_factory=list)

    @property
    def spoiled(self) -> int:
        """Number of requests that failed although they must succeed, or did not end."""
        return sum(
            count
            for (scenario, outcome), count in self.outcomes.items()
            if outcome == NO_END or (scenario in ALWAYS_WHOLE and outcome != "whole")
        )

    @property
    def slope_kib_per_min(self) -> float | None:
        """The trend of memory after it settled."""
        return slope([(second / 60, kib) for second, kib in self.rss if second >= SETTLED_S])

    def rss_mib_at(self, second: float) -> float | None:
        """Memory at a time, or at the next sample after it."""
        return next((kib / 1024 for at, kib in self.rss if at >= second), None)


def table(soaked: Soaked) -> Table:
    """Return the section of the results."""
    left = soaked.leftovers
    last = soaked.rss[-1][1] / 1024 if soaked.rss else None
    rows = [
        ["RSS MiB after a minute", number(soaked.rss_mib_at(SETTLED_S), 1)],
        ["RSS MiB at the end", number(last, 1)],
        ["slope after the first minute, KiB per minute", number(soaked.slope_kib_per_min, 1)],
        ["requests", number(sum(soaked.outcomes.values()), 0)],
        ["good requests that failed, and any without an end", number(soaked.spoiled, 0)],
    ]
    for name, value in (msgspec.structs.asdict(left) if left else {}).items():
        shown = ", ".join(value) or "0" if isinstance(value, list) else str(value)
        rows.append([f"left open: {name.replace('_', ' ')}", shown])
    rows += [[f"{s}: {o}", number(c, 0)] for (s, o), c in sorted(soaked.outcomes.items())]
    return Table(
        "Soak",
        ["", "count"],
        rows,
        f"{soaked.minutes:g} minutes of {soaked.clients} clients at once, seed {soaked.seed}: "
        "valid requests, slow readers, disconnects at any time, invalid requests, and an engine "
        "with the faults of `tests/fakes/vllm.py`. `engine idle` are connections kept open for "
        "the next request; the outcome of a fault is the response that its client got.",
    )


async def load(soaked: Soaked, port: int, pid: int) -> None:
    """Play until the time is over, or the count; every connection is closed after."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    end = started + soaked.minutes * 60

    async def user(index: int) -> None:
        dice = random.Random(soaked.seed * 100_003 + index)
        client = Client(port, KEY, dice, f"soak-{index}")
        while loop.time() < end and soaked.outcomes.total() < MAX_REQUESTS:
            played = await play(client)
            soaked.outcomes[played] += 1
            if played[1] == NO_END:
                soaked.unfinished.append(client.request_id)
            await asyncio.sleep(client.dice.random() * PAUSE_S)

    async def watch() -> None:
        pids = proc.family(pid)
        while True:
            soaked.rss.append((loop.time() - started, proc.rss_kib(pids)))
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    try:
        async with asyncio.timeout(soaked.minutes * 60 + 2 * PATIENCE_S):
            await asyncio.gather(*(user(index) for index in range(soaked.clients)))
    finally:
        watching.cancel()


@contextlib.contextmanager
def fake() -> Iterator[str]:
    """Run the misbehaving engine of the tests; the value is its URL."""
    port = free_port()
    argv = [sys.executable, "-m", "tests.fakes.vllm", f"--port={port}"]
    url = f"http://127.0.0.1:{port}"
    with child("fake", [*argv, f"--served-model-name={FAULTY}"]) as running:
        wait_until(lambda: answers(url, FAULTY), running, 30)
        yield url


@contextlib.contextmanager
def gateway(directory: Path, engines: dict[str, str]) -> Iterator[tuple[Child, int]]:
    """Run the gateway's application on these engines; the values are its process and its port."""
    port = free_port()
    models: list[dict[str, object]] = [
        {
            "name": name,
            "engines": [
                {"kind": "remote", "url": url} | ({"timeouts": QUICK} if name == FAULTY else {})
            ],
        }
        for name, url in engines.items()
    ]
    config = directory / "gateway.yaml"
    config.write_text(yaml.safe_dump(configuration(directory, port, models)))
    argv = [sys.executable, "-m", "bench.soak_gateway", str(config)]
    with child("soak-gateway", argv, env=environment(GATEWAY_API_KEYS=KEY)) as running:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}", PACED), running, 30)
        yield running, port


def soak(minutes: float, clients: int, seed: int) -> Soaked:
    """Run everything; return the results. Raises StartError."""
    soaked = Soaked(minutes, clients, seed)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = {
            PACED: stack.enter_context(stub("stub-paced", itl_ms=10)),
            FAST: stack.enter_context(stub("stub-fast", itl_ms=0)),
            FAULTY: stack.enter_context(fake()),
        }
        running, port = stack.enter_context(gateway(directory, engines))
        asyncio.run(load(soaked, port, running.pid))
        soaked.leftovers = _last_words(running)
    return soaked


def _last_words(running: Child) -> Leftovers:
    """End the gateway; return its report on leaks. Raises StartError without a report."""
    running.end(30)
    last = running.log.read_text().splitlines()[-1]
    try:
        return msgspec.json.decode(last, type=Leftovers)
    except msgspec.DecodeError:
        raise StartError(f"the gateway ended with other words than it should: {last}") from None


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description="The soak.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    console = Console(stderr=True)
    started = time.strftime("%H:%M")
    try:
        with (
            terminated_like_interrupted(),
            console.status(f"soaking since {started}, {options.minutes:g} minutes"),
        ):
            soaked = soak(options.minutes, options.clients, options.seed)
    except StartError as error:
        sys.exit(str(error))
    made = table(soaked)
    output = RESULTS if options.minutes >= WORTH_KEEPING_MIN else WORK / "RESULTS.md"
    text = output.read_text() if output.exists() else ""
    output.write_text(replace_section(text, made.markdown()))
    show(made)
    for request_id in soaked.unfinished:
        console.print(f"without an end: {request_id}; see .bench/log/soak-gateway.log")
    console.print(f"written to {output.relative_to(WORK.parent)}")
    assert soaked.leftovers is not None
    sys.exit(0 if soaked.leftovers.clean and not soaked.spoiled else 1)


if __name__ == "__main__":
    main()
