"""CPU of a gateway for open pages of the console, while a light load changes what they show."""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from bench.children import child, wait_until
from bench.costs import Cost, cost_table
from bench.open_pages import READY
from bench.peers import ADMIN_KEY, KEY, MODEL, START_S, Target, gateway, in_front_of, stub
from bench.proc import cpu_clocks, cpu_spent, family
from bench.report import Table

PAGES = 50
ROUNDS = 10
WINDOW_S = 5.0
# Enough that every event of a page has something new.
REQUESTS_PER_S = 20
# 2 % of a core.
BUDGET_MS = 20.0
TITLE = "Open pages of the console"


def measure(*, quick: bool) -> list[Cost]:
    """Return what the pages cost: rounds with and without them take turns."""
    found: list[float] = []
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = in_front_of(stack.enter_context(stub()))
        running, url = stack.enter_context(gateway(home, models, admin_key=ADMIN_KEY))
        target = Target("", url, running.pid)
        for _ in range(1 if quick else ROUNDS):
            without = _cpu_ms(target)
            with _open_pages(url):
                found.append(_cpu_ms(target) - without)
    return [Cost(f"CPU per second, {PAGES} pages open", "ms", found, BUDGET_MS)]


def table(costs: Sequence[Cost]) -> Table:
    """Return the section of the report."""
    return cost_table(
        TITLE,
        costs,
        f"A gateway in front of a stub engine answers {REQUESTS_PER_S} requests a second. Its CPU "
        f"in {WINDOW_S:g} s with {PAGES} open pages of the overview, less that in {WINDOW_S:g} s "
        "without, in turn. 20 ms are 2 % of a core.",
    )


def _cpu_ms(target: Target) -> float:
    """Return the CPU of the gateway and its children in ms per second, under the light load."""
    assert target.pid is not None
    pids = family(target.pid)
    before = cpu_clocks(pids)
    asyncio.run(_send_load(target.url))
    return cpu_spent(before, cpu_clocks(family(target.pid))) / WINDOW_S * 1e3


async def _send_load(url: str) -> None:
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as client:
        now = asyncio.get_running_loop().time
        began = now()
        for number in range(int(WINDOW_S * REQUESTS_PER_S)):
            await asyncio.sleep(began + number / REQUESTS_PER_S - now())
            response = await client.post("/v1/chat/completions", json=body)
            response.raise_for_status()
        await asyncio.sleep(began + WINDOW_S - now())


@contextlib.contextmanager
def _open_pages(url: str) -> Iterator[None]:
    """Keep pages of the console open; each has got its first event when the body begins."""
    options = (f"--url={url}", f"--key={ADMIN_KEY}", f"--pages={PAGES}")
    with child("open-pages", [sys.executable, "-m", "bench.open_pages", *options]) as running:
        wait_until(lambda: READY in running.log.read_text(), running, START_S)
        yield
