"""A gateway on the demo model with something to see: keys of several owners, and their requests."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.deployment import ADMIN_KEY, ENGINE, Deployment, demo_model, deployed
from tests.gateway import free_port, remote
from tests.waiting import poll_until

START_S = 300.0
# Two variants of one model, so that a page has something to compare.
SMALL = {**ENGINE, "args": {**ENGINE["args"], "max-num-seqs": 4, "max-model-len": 1024}}
# More of the demo model's own questions are in engines/demo/dialogues.py.
QUESTIONS = (
    "Which is larger, 9.9 or 9.11?",
    "What is the capital of France?",
    "中国最长的河是哪条？",
    "Tell me a story about a lighthouse.",
)
KEYS: Sequence[dict[str, Any]] = (
    {"name": "Web shop", "owner": "shop", "monthly_tokens": 20_000},
    {"name": "Search assistant", "owner": "shop"},
    {"name": "Nightly tests", "owner": "platform", "requests_per_minute": 2},
    {"name": "数据分析", "owner": "research"},
)


@dataclass(frozen=True, slots=True)
class DemoSite:
    """The running gateway, and the text of the keys that were made, by name."""

    deployment: Deployment
    keys: dict[str, str]
    # Where fakes are to listen, by the name of their model.
    ports: Mapping[str, int] = field(default_factory=dict)

    def admin(self) -> httpx.Client:
        """A client with the root key."""
        return self.deployment.client(ADMIN_KEY)


@contextmanager
def demo_site(directory: Path, *, variants: int = 2) -> Iterator[DemoSite]:
    """Run the demo model in one or two variants, a model on demand and one that is unreachable."""
    demo_model()
    demo = {"name": "demo", "aliases": ["gpt-4o-mini"], "engines": [ENGINE, SMALL][:variants]}
    on_demand = {"name": "demo-large", "load": "on_demand", "engines": [ENGINE]}
    unreachable = {
        "name": "mistral-small",
        "engines": [remote(f"http://127.0.0.1:{free_port()}")],
    }
    with deployed(directory, demo, on_demand, unreachable) as deployment:
        poll_until(lambda: _ready(deployment) == variants, START_S)
        with deployment.client(ADMIN_KEY) as admin:
            keys = make_keys(admin, KEYS)
            budget = admin.put("/admin/owners/shop", json={"monthly_tokens": 50_000})
            assert budget.status_code == 201, budget.text
        yield DemoSite(deployment, keys)


def _ready(deployment: Deployment) -> int:
    assert deployment.process.poll() is None, deployment.said()
    with deployment.client(ADMIN_KEY) as admin:
        engines = admin.get("/admin/engines").json()["data"]
    return sum(one["state"] == "ready" for one in engines if one["model"] == "demo")


def make_keys(admin: httpx.Client, wanted: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Make keys; return their text by name."""
    keys: dict[str, str] = {}
    for fields in wanted:
        made = admin.post("/admin/keys", json=fields)
        assert made.status_code == 201, made.text
        keys[fields["name"]] = made.json()["key"]
    return keys


async def make_traffic(site: DemoSite, rounds: int) -> None:
    """Ask each question with each key in each round; limits refuse some of them."""
    async with httpx.AsyncClient(base_url=site.deployment.url, timeout=120) as client:
        for _ in range(rounds):
            await asyncio.gather(
                *(
                    _ask(client, key, question)
                    for key in site.keys.values()
                    for question in QUESTIONS
                )
            )


async def _ask(client: httpx.AsyncClient, key: str, question: str) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "temperature": 0,
    }
    headers = {"authorization": f"Bearer {key}"}
    async with client.stream(
        "POST", "/v1/chat/completions", json=body, headers=headers
    ) as response:
        await response.aread()
