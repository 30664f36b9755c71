"""POST /v1/chat/completions/batch: several conversations, each answered, counted and bounded."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.raw import connected, request
from tests.app.tenants import make_key, tokens
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, serving_demo

BATCH = "/v1/chat/completions/batch"
SPOKEN = [{"role": "user", "content": "hi"}]


async def ask(gateway: Gateway, conversations: int = 3, **fields: Any) -> httpx.Response:
    body = {"model": "demo", "messages": [SPOKEN] * conversations, **fields}
    return await gateway.client.post(BATCH, json=body)


async def test_every_conversation_has_a_choice_and_is_billed(gateway: Gateway) -> None:
    answer = (await ask(gateway)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert await tokens(gateway, "prompt") == answer["usage"]["prompt_tokens"] == 9
    assert await tokens(gateway, "completion") == answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("stream", [True, "yes", 1])
async def test_stream_is_refused_for_vllm_would_report_the_last_chunk_only(
    gateway: Gateway, fake: Fake, stream: object
) -> None:
    answer = await ask(gateway, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("field_not_allowed", "stream")
    assert not any(seen.method == "POST" for seen in fake.seen)


@pytest.mark.parametrize("stream", [False, None])
async def test_no_stream_may_be_said(gateway: Gateway, stream: object) -> None:
    assert (await ask(gateway, stream=stream)).status_code == 200


async def test_more_conversations_than_the_bound_are_refused(gateway: Gateway, fake: Fake) -> None:
    answer = await ask(gateway, 257)
    assert answer.status_code == 400
    assert "256 are allowed" in answer.text
    assert not any(seen.method == "POST" for seen in fake.seen)


async def test_limit_holds_for_all_conversations_together(fake: Fake, tmp_path: Path) -> None:
    limits = {"default": {"tokens_per_minute": 1000}}
    async with serving_demo(tmp_path, fake.url, limits=limits) as gateway:
        assert (await ask(gateway, 2, max_tokens=400)).status_code == 200
        answer = await ask(gateway, 3, max_tokens=400)
        assert answer.status_code == 429


async def test_operators_bound_limits_each_conversation(fake: Fake, tmp_path: Path) -> None:
    async with serving_demo(tmp_path, fake.url, model={"max_output_tokens": 50}) as gateway:
        await ask(gateway)
        assert fake.seen[-1].json["max_tokens"] == 50


async def test_budget_is_divided_among_the_conversations(gateway: Gateway, fake: Fake) -> None:
    headers = await make_key(gateway, "poor", daily_tokens=600)
    body = {"model": "demo", "messages": [SPOKEN] * 4}
    assert (await gateway.client.post(BATCH, json=body, headers=headers)).status_code == 200
    assert 0 < fake.seen[-1].json["max_tokens"] <= 600 // 4


async def test_canceled_batch_is_billed_its_reservation(gateway: Gateway, fake: Fake) -> None:
    fields = {"messages": [SPOKEN] * 3, "max_tokens": 70, "fake": "tokens:70:5"}
    body = json.dumps({"model": "demo", **fields}).encode()
    async with connected(gateway) as client:
        client.send(request(body, path=BATCH.encode()))
        await fake.until_running()
    await fake.until_idle()
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), 5)
    assert await tokens(gateway, "completion") == 210


async def test_reasoning_of_every_choice_has_both_names(fake: Fake, tmp_path: Path) -> None:
    async with serving_demo(tmp_path, fake.url, model={"reasoning_field": "both"}) as gateway:
        answer = (await ask(gateway, 2, fake="say:<think>so</think>yes")).json()
    messages = [choice["message"] for choice in answer["choices"]]
    assert all(one["reasoning_content"] == one["reasoning"] for one in messages)


async def test_media_of_any_conversation_is_checked(gateway: Gateway) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}
    body = {"model": "demo", "messages": [SPOKEN, [{"role": "user", "content": [image]}]]}
    answer = await gateway.client.post(BATCH, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "media_not_allowed")
