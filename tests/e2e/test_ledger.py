"""The ledger on real vLLM equals the usage reported to clients, to the token."""

import asyncio
import json
import random
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.deployment import ADMIN_KEY, Deployment
from tests.waiting import poll_until

REQUESTS = 300
AT_ONCE = 24
ASKED = {"include_usage": True}
PROMPTS = ("Tell me a story.", "What is the factorial of 5?", "Hello!", "你好", "Once upon a time")


def mixed(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a request of any kind whose response reports usage."""
    prompt = dice.choice(PROMPTS)
    messages = [{"role": "user", "content": prompt}]
    tokens = dice.randint(1, 24)
    stream: dict[str, Any] = (
        {"stream": True, "stream_options": ASKED} if dice.random() < 0.5 else {}
    )
    several = {"n": dice.randint(2, 3), "temperature": 1.0} if dice.random() < 0.2 else {}
    match dice.randrange(5):
        case 0 | 1:
            body = {"messages": messages, "max_tokens": tokens, **stream, **several}
            return "/v1/chat/completions", {"model": "demo", **body}
        case 2:
            prompts = [prompt] * dice.randint(1, 3)
            body = {"prompt": prompts, "max_tokens": tokens, **stream, **several}
            return "/v1/completions", {"model": "gpt-4o-mini", **body}
        case 3:
            # Not stored: its owner would have to be written within a deadline.
            body = {"input": prompt, "max_output_tokens": tokens, "stream": bool(stream)}
            body["store"] = False
            return "/v1/responses", {"model": "demo", **body}
        case _:
            body = {"messages": messages, "max_tokens": tokens, "stream": bool(stream)}
            return "/v1/messages", {"model": "demo", **body}


def reported_usage(answer: bytes) -> tuple[int, int]:
    """Return the prompt and completion tokens reported to a client, in any dialect."""
    documents = [answer]
    if not answer.startswith(b"{"):
        lines = answer.splitlines()
        documents = [line[6:] for line in lines if line.startswith(b"data: {")]
    prompt = completion = 0
    for document in documents:
        data = json.loads(document)
        usage = (
            data.get("usage")
            or (data.get("response") or {}).get("usage")
            or (data.get("message") or {}).get("usage")
            or {}
        )
        inputs = usage.get("prompt_tokens", usage.get("input_tokens", 0)) or 0
        prompt = max(prompt, inputs + (usage.get("cache_read_input_tokens") or 0))
        completion = max(completion, usage.get("completion_tokens", usage.get("output_tokens", 0)))
    return prompt, completion


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, int]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = reported_usage(answer.content)
    assert found[0] > 0, answer.text
    return found


def ledger(gateway: Deployment, key: str) -> dict[str, int]:
    """Return what the ledger holds for a key."""
    with gateway.client(ADMIN_KEY) as admin:
        answer = admin.get("/admin/usage", params={"by": "key", "key": key.split("-")[2]})
    assert answer.status_code == 200, answer.text
    (row,) = answer.json()["data"] or [Counter()]
    return dict(row)


@pytest.fixture
def key(gateway: Deployment) -> str:
    """A key of the test's own, so that the ledger's sums are this test's."""
    with gateway.client(ADMIN_KEY) as admin:
        made = admin.post("/admin/keys", json={"name": secrets.token_hex(4)})
    assert made.status_code == 201, made.text
    text: str = made.json()["key"]
    return text


async def test_ledger_matches_the_usage_reported_to_clients(
    gateway: Deployment, key: str, show: Callable[[str], None]
) -> None:
    dice = random.Random(4)
    requests = [mixed(dice) for _ in range(REQUESTS)]
    turn = asyncio.Semaphore(AT_ONCE)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=300) as client:

        async def one(path: str, body: dict[str, Any]) -> tuple[int, int]:
            async with turn:
                return await ask(client, path, body)

        answers = await asyncio.gather(*(one(*request) for request in requests))
    poll_until(lambda: ledger(gateway, key).get("requests", 0) >= REQUESTS, 30)
    row = ledger(gateway, key)
    prompt, completion = (sum(part) for part in zip(*answers, strict=True))
    show(
        f"{REQUESTS} requests: clients were told {prompt}+{completion} tokens, "
        f"the ledger holds {row['prompt_tokens']}+{row['completion_tokens']}"
    )
    assert row["requests"] == REQUESTS
    assert (row["prompt_tokens"], row["completion_tokens"]) == (prompt, completion)
    assert row["estimated_requests"] == 0


def test_canceled_stream_is_recorded_as_estimated(gateway: Deployment, key: str) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}],
        "stream": True,
        "n": 64,
        "temperature": 1.0,
    }
    path = "/v1/chat/completions"
    with gateway.client(key) as client, client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        next(answer.iter_raw())
    poll_until(lambda: ledger(gateway, key).get("requests", 0) == 1, 30)
    row = ledger(gateway, key)
    assert row["estimated_requests"] == 1
    assert row["prompt_tokens"] > 0
