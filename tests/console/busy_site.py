"""The gateway of the screenshots: the demo model on vLLM, and a team's traffic of two months.

The other models are fakes, which answer hundreds of requests for the CPU time of one of the demo's:
one has a queue, one fails now and then, one cannot be reached, one loads.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.console.demo_site import QUESTIONS, SMALL, START_S, DemoSite, make_keys
from tests.console.past_usage import PRICES, store_past
from tests.e2e.deployment import ADMIN_KEY, ENGINE, demo_model, deployed, until_ready
from tests.fakes.vllm import Fake
from tests.gateway import free_port, remote
from tests.waiting import wait_until

KEYS: Sequence[dict[str, Any]] = (
    {"name": "Web shop", "owner": "shop", "monthly_tokens": 2_000_000},
    {"name": "Search assistant", "owner": "shop", "monthly_cost": 5},
    {"name": "Nightly tests", "owner": "platform", "requests_per_minute": 40},
    {"name": "数据分析", "owner": "research", "daily_tokens": 400_000},
    {"name": "Interns", "owner": "research", "models": ["demo", "qwen3-32b"]},
)
OWNERS: dict[str, dict[str, Any]] = {
    "shop": {"monthly_tokens": 5_000_000},
    "research": {"monthly_cost": 20},
    "platform": {"requests_per_minute": 600},
}
# Seconds of traffic before the first picture; it goes on until the last.
BEFORE_S = 45.0


@contextmanager
def busy_site(directory: Path) -> Iterator[DemoSite]:
    """Run the gateway, with the past in its database; `traffic` makes its present."""
    demo_model()
    ports = {name: free_port() for name in ("qwen3-32b", "gemma-3-12b", "bge-m3")}
    served = {name: remote(f"http://127.0.0.1:{port}") for name, port in ports.items()}
    demo = {"aliases": ["gpt-4o-mini"], "engines": [ENGINE], "policy": "prefix"}
    queue = {"max_in_flight": 4, "max_waiting": 64}
    models: list[dict[str, Any]] = [
        {"name": "demo", **demo, "price": PRICES["demo"].model_dump()},
        {
            "name": "qwen3-32b",
            "aliases": ["qwen3"],
            "fallbacks": ["gemma-3-12b"],
            "queue": queue,
            "price": PRICES["qwen3-32b"].model_dump(),
            "engines": [served["qwen3-32b"]],
        },
        {
            "name": "gemma-3-12b",
            "price": PRICES["gemma-3-12b"].model_dump(),
            "engines": [served["gemma-3-12b"]],
        },
        {"name": "bge-m3", "engines": [served["bge-m3"]]},
        {"name": "demo-large", "load": "on_demand", "engines": [SMALL]},
        {"name": "mistral-small", "engines": [remote(f"http://127.0.0.1:{free_port()}")]},
    ]
    variables = {"GATEWAY_CONSOLE__EDIT_CONFIGURATION": "true", "GATEWAY_USAGE__CURRENCY": "EUR"}
    with deployed(directory, *models, variables=variables) as deployment:
        until_ready(deployment)
        with deployment.client(ADMIN_KEY) as admin:
            keys = make_keys(admin, KEYS)
            for owner, limits in OWNERS.items():
                admin.put(f"/admin/owners/{owner}", json=limits).raise_for_status()
            made = admin.get("/admin/keys").json()["data"]
        past = [(one["id"], one["owner"]) for one in made if one["name"] in keys]
        asyncio.run(store_past(directory / "gateway.db", past, time.time()))
        yield DemoSite(deployment, keys, ports)


@asynccontextmanager
async def traffic(site: DemoSite) -> AsyncIterator[None]:
    """Start the fakes, and send requests of all keys until the end."""
    async with AsyncExitStack() as stack:
        for name, port in site.ports.items():
            fake = Fake(model=name, max_model_len=32_768)
            await fake.start(port=port)
            stack.push_async_callback(fake.stop)
        client = httpx.AsyncClient(base_url=site.deployment.url, timeout=START_S)
        await stack.enter_async_context(client)
        await wait_until(lambda: _ready(site) >= len(site.ports) + 1)
        senders = [
            asyncio.create_task(_send(client, key, number))
            for number, key in enumerate(site.keys.values())
        ]
        try:
            await asyncio.sleep(BEFORE_S)
            yield
        finally:
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)


def _ready(site: DemoSite) -> int:
    with site.admin() as admin:
        engines = admin.get("/admin/engines").json()["data"]
    return sum(one["state"] == "ready" for one in engines)


async def _send(client: httpx.AsyncClient, key: str, number: int) -> None:
    """Send requests of one key: batches to a model with a queue, some that fail, one in a while
    to the demo."""
    turn = number
    while True:
        turn += 1
        count = 40 + 37 * (turn % 9)
        batch = [
            _chat(client, key, "qwen3-32b", f"tokens:{count}:{20 + 3 * (turn % 5)}"),
            _chat(client, key, "qwen3-32b", f"tokens:{2 * count}:25"),
            _chat(client, key, "gemma-3-12b", f"tokens:{count}:15"),
        ]
        if turn % 3 == 0:
            batch.append(_chat(client, key, "gemma-3-12b", "dead_stream:4"))
        if turn % 4 == 0:
            batch.append(_chat(client, key, "demo", question=QUESTIONS[turn % len(QUESTIONS)]))
        if turn % 5 == 0:
            batch.append(_chat(client, key, "mistral-small"))
        await asyncio.gather(*batch)
        await asyncio.sleep(0.5 + turn % 3)


async def _chat(
    client: httpx.AsyncClient, key: str, model: str, fake: str = "", question: str = "Hello"
) -> None:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "max_tokens": 1024,
        **({"fake": fake} if fake else {"temperature": 0}),
    }
    headers = {"authorization": f"Bearer {key}"}
    path = "/v1/chat/completions"
    async with client.stream("POST", path, json=body, headers=headers) as response:
        await response.aread()
