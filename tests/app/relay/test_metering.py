"""Billing of every 2xx response: reported usage, else counted, else reserved."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.raw import connected, request
from tests.app.tenants import make_key, tokens
from tests.fakes.stream_faults import StreamFault
from tests.fakes.vllm import Fake
from tests.gateway import AUTH, Gateway, serving_demo
from tests.waiting import PATIENCE_S

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
LONGEST = 100_000


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    async with Fake(max_model_len=LONGEST) as server:
        yield server


async def test_canceled_stream_is_billed_for_its_chunks(gateway: Gateway, fake: Fake) -> None:
    """With stream_interval, an event would hold 500 tokens and count as one."""
    body = {**CHAT, "stream": True, "stream_interval": 500, "fake": "tokens:100000:0.01"}
    words = 0
    async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            words += line.count("word")
            if words >= 4000:
                break
    await fake.until_idle()
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), 5)
    posted = next(seen for seen in fake.seen if seen.method == "POST")
    assert "stream_interval" not in posted.json
    assert words <= await tokens(gateway, "completion") <= LONGEST


async def test_events_with_many_tokens_are_billed_by_their_bytes(
    fake: Fake, tmp_path: Path
) -> None:
    """As vLLM bundles them for a client that reads slowly."""
    fields = {"allow": ["stream_interval"]}
    body = {**CHAT, "stream": True, "stream_interval": 500, "fake": "tokens:100000:0.01"}
    words = 0
    async with serving_demo(tmp_path, fake.url, model={"fields": fields}) as gateway:
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                words += line.count("word")
                if words >= 4000:
                    break
        await fake.until_idle()
        await asyncio.wait_for(gateway.state.admission.wait_until_idle(), 5)
        assert 0.9 * words <= await tokens(gateway, "completion") <= LONGEST


@pytest.mark.parametrize("form", ["bytes", "bytes_only"])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_embeddings_in_bytes_are_billed(
    gateway: Gateway, fake: Fake, path: str, form: str
) -> None:
    body = {"model": "demo", "input": "x", "encoding_format": form, "fake": "bytes:200000"}
    answer = await gateway.client.post(path, json=body)
    assert answer.content == b"\0\0\0\0"
    assert ("metadata" in answer.headers) is (form == "bytes")
    assert await tokens(gateway, "prompt") == LONGEST  # of what was told, as much as can be
    assert fake.seen[-1].json["encoding_format"] == "bytes"


async def test_embeddings_in_bytes_are_billed_for_any_encoding_format(
    gateway: Gateway, fake: Fake
) -> None:
    raw = rb'{"model":"demo","input":"x","encoding_format":"bytes\u005fonly","fake":"bytes:200000"}'
    headers = {"content-type": "application/json"}
    answer = await gateway.client.post("/pooling", content=raw, headers=headers)
    assert answer.content == b"\0\0\0\0"
    assert "metadata" not in answer.headers
    assert await tokens(gateway, "prompt") == LONGEST


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_response_without_usage_is_billed_by_its_bytes(gateway: Gateway, path: str) -> None:
    body = {**CHAT, "prompt": "hi " * 100, "max_tokens": 1000, "fake": "silent:300"}
    answer = await gateway.client.post(path, json=body)
    assert answer.status_code == 200
    assert await tokens(gateway, "completion") == len(answer.content)
    assert await tokens(gateway, "prompt") >= 75


async def test_response_longer_than_reserved_is_billed_in_full(fake: Fake, tmp_path: Path) -> None:
    """A request that states no length reserves less than the model may write."""
    limits = {"unstated_output_tokens": 8}
    async with serving_demo(tmp_path, fake.url, limits=limits) as gateway:
        answer = await gateway.chat(fake="silent:300")
        assert await tokens(gateway, "completion") == len(answer.content)


async def test_more_prompts_than_the_bound_are_refused_as_embeddings_too(
    gateway: Gateway, fake: Fake
) -> None:
    body = {"model": "demo", "prompt": "x", "prompt_embeds": ["AAAA"] * 256}
    answer = await gateway.client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "256 are allowed" in answer.text
    assert not any(seen.method == "POST" for seen in fake.seen)


async def test_audio_is_billed(gateway: Gateway) -> None:
    files = {"file": ("a.wav", b"\0" * 40_000), "model": (None, b"demo")}
    answer = await gateway.client.post("/v1/audio/transcriptions", files=files)
    assert answer.status_code == 200
    assert await tokens(gateway, "prompt") >= 100


async def test_canceled_plain_request_is_billed_its_reservation(
    gateway: Gateway, fake: Fake
) -> None:
    body = json.dumps({**CHAT, "max_tokens": 700, "fake": "tokens:700:5"}).encode()
    async with connected(gateway) as client:
        client.send(request(body, path=b"/v1/chat/completions"))
        await fake.until_running()
    await fake.until_idle()
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), 5)
    assert await tokens(gateway, "completion") == 700


async def test_pipelined_response_behind_an_unread_one_is_billed_as_reported(
    gateway: Gateway, fake: Fake
) -> None:
    body = json.dumps({**CHAT, "max_tokens": 100, "fake": "long:900"}).encode()
    admission = gateway.state.admission
    async with connected(gateway) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(request(body, path=b"/v1/chat/completions") * 16)
        async with asyncio.timeout(PATIENCE_S):
            waits = 0
            while waits < 20:  # the engine is done, and the answer has not left
                await asyncio.sleep(0.005)
                waits = waits + 1 if admission.in_flight and not fake.running else 0
    await asyncio.wait_for(admission.wait_until_idle(), PATIENCE_S)
    answers = sum(seen.method == "POST" for seen in fake.seen)
    assert await tokens(gateway, "completion") == 2 * answers


async def test_error_of_the_engine_costs_no_tokens(gateway: Gateway) -> None:
    assert (await gateway.chat(max_tokens=-1)).status_code == 400
    assert (await gateway.chat(fake="status:500")).status_code == 500
    assert (await gateway.chat(fake="close")).status_code == 502
    assert await tokens(gateway, "prompt") == 0


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_count_tokens_takes_a_fraction_of_the_limit(
    fake: Fake, tmp_path: Path, path: str
) -> None:
    limits = {"default": {"tokens_per_minute": 10_000}, "tokenize_weight": 0.1}
    async with serving_demo(tmp_path, fake.url, limits=limits) as gateway:
        body = {"model": "demo", "prompt": "x" * 40_000}
        answer = await gateway.client.post(path, json=body)
        assert answer.status_code == 200
        assert 8900 <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 9010
        for _ in range(100):  # the bucket refills meanwhile
            answer = await gateway.client.post(path, json=body)
            if answer.status_code == 429:
                break
        assert answer.status_code == 429
        assert await tokens(gateway, "prompt") == 0  # the model computed nothing


async def test_implausible_usage_is_capped(gateway: Gateway) -> None:
    answer = await gateway.chat(max_tokens=10, fake=f"usage:{10**15}")
    assert answer.status_code == 200
    assert await tokens(gateway, "prompt") == LONGEST
    assert await tokens(gateway, "completion") == 10


async def test_stream_with_content_length_is_complete_without_its_usage_chunk(
    gateway: Gateway,
) -> None:
    answer = await gateway.chat(stream=True, fake="framed")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert '"usage":{' not in answer.text
    assert "content-length" not in answer.headers


class TestPromptsTimesChoices:
    async def test_more_prompts_times_choices_than_the_bound_are_refused(
        self, gateway: Gateway, fake: Fake
    ) -> None:
        body = {"model": "demo", "prompt": ["x"] * 2000, "n": 128, "max_tokens": 4000}
        answer = await gateway.client.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "256 are allowed" in answer.text
        assert not any(seen.method == "POST" for seen in fake.seen)

    async def test_more_inputs_than_the_bound_are_refused(self, gateway: Gateway) -> None:
        body = {"model": "demo", "input": ["x"] * 2049}
        answer = await gateway.client.post("/v1/embeddings", json=body)
        assert answer.status_code == 400
        assert "2048" in answer.text

    async def test_one_request_blocks_its_limit_for_a_minute_at_most(
        self, fake: Fake, tmp_path: Path
    ) -> None:
        limits = {"default": {"tokens_per_minute": None}}
        async with serving_demo(
            tmp_path,
            fake.url,
            model={"max_sequences": None, "limits": {"tokens_per_minute": 1_000_000}},
            limits=limits,
        ) as gateway:
            body = {"model": "demo", "prompt": ["x"] * 2000, "n": 128, "max_tokens": 4000}
            body["fake"] = "hang"
            other = await make_key(gateway, "other")
            # The limit refills at once: as much as the next request takes, in half a minute.
            large = {**CHAT, "max_tokens": 500_000}
            async with connected(gateway) as client:
                client.send(request(json.dumps(body).encode()))
                await fake.until_running()
                answer = await gateway.client.post(
                    "/v1/chat/completions", json=large, headers=other
                )
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) <= 60


class TestBudgets:
    async def test_request_without_output_limit_gets_the_remaining_budget(
        self, gateway: Gateway, fake: Fake
    ) -> None:
        headers = await make_key(gateway, "small", daily_tokens=5000)
        body = {**CHAT, "stream": True}
        answer = await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert 0 < fake.seen[-1].json["max_tokens"] < 5000

    @pytest.mark.parametrize("at_once", [1, 8])
    async def test_daily_budget_is_hard_without_output_limits(
        self, gateway: Gateway, fake: Fake, at_once: int
    ) -> None:
        budget = 50_000
        headers = await make_key(gateway, "hard", daily_tokens=budget)

        async def ask() -> httpx.Response:
            return await gateway.client.post(
                "/v1/chat/completions", json={**CHAT, "fake": "fill"}, headers=headers
            )

        for _ in range(40):
            answers = await asyncio.gather(*(ask() for _ in range(at_once)))
            assert await tokens(gateway, "prompt") + await tokens(gateway, "completion") <= budget
            if all(answer.status_code == 429 for answer in answers):
                break
        assert {answer.status_code for answer in answers} == {429}
        used = await tokens(gateway, "prompt") + await tokens(gateway, "completion")
        assert used >= 0.9 * budget  # and what is there can be used

    async def test_output_limit_of_the_client_is_kept(self, gateway: Gateway, fake: Fake) -> None:
        headers = await make_key(gateway, "stated", daily_tokens=5000)
        body = {**CHAT, "max_tokens": 7}
        await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
        assert fake.seen[-1].json["max_tokens"] == 7


async def test_refused_request_is_counted(fake: Fake, tmp_path: Path) -> None:
    limits = {"default": {"requests_per_minute": 3}}
    async with serving_demo(tmp_path, fake.url, limits=limits) as gateway:
        found = [
            (await gateway.client.post("/v1/completions", content=body, headers=AUTH)).status_code
            for body in (b"{", b'{"model":"nobody"}', b'{"n":1}', b"{")
        ]
        assert found == [400, 404, 400, 429]


MERGED = 1000
LEFT = [
    (1, CHAT, {"n": 2}),
    (1, CHAT, {"logprobs": True}),
    (1, CHAT, {"logprobs": False}),
    (1, CHAT, {"logit_bias": {"7": 100}}),
    (1, CHAT, {"include_reasoning": False}),
    (1, {"model": "demo", "prompt": "x"}, {"n": 2}),
    (1, {"model": "demo", "prompt": "x"}, {"logprobs": 1}),
    (2, {"model": "demo", "prompt": ["x", "y"]}, {}),
]


@pytest.mark.parametrize("continuation", ["exact", "off"])
@pytest.mark.parametrize(("prompts", "base", "fields"), LEFT)
async def test_stream_of_merged_tokens_that_is_left_is_billed_in_full(
    tmp_path: Path, continuation: str, prompts: int, base: dict[str, Any], fields: dict[str, Any]
) -> None:
    """As vLLM merges the tokens that wait for a client that reads slowly: one event per choice."""
    path = "/v1/completions" if "prompt" in base else "/v1/chat/completions"
    choices = fields.get("n", 1)
    body = {**base, **fields, "stream": True, "max_tokens": 2 * MERGED}
    engine = Fake(
        max_model_len=LONGEST,
        widths=(1, MERGED),
        fault="say:" + "word " * 2 * MERGED,
        stream_fault=StreamFault("stall", choices * MERGED),
    )
    model = {"continuation": continuation}
    async with engine, serving_demo(tmp_path, engine.url, model=model) as gateway:
        text = ""
        async with gateway.client.stream("POST", path, json=body) as answer:
            async for line in answer.aiter_lines():
                text += line
                if text.count("word") >= choices * MERGED:
                    break
        await engine.until_idle()
        await asyncio.wait_for(gateway.state.admission.wait_until_idle(), 5)
        billed = await tokens(gateway, "completion")
    print(f"{fields} {continuation}: {text.count('word')} read, {billed} billed")
    assert 0.95 * text.count("word") <= billed <= 2 * MERGED * choices * prompts


async def test_hidden_thoughts_of_a_stream_that_is_left_are_billed_as_reserved(
    gateway: Gateway, fake: Fake
) -> None:
    """VLLM writes no event for a hidden thought."""
    body = {**CHAT, "stream": True, "include_reasoning": False, "max_tokens": 5000}
    body |= {"fake": "say:hello there", "fake_fault": "stall:1"}
    async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            break
    await fake.until_idle()
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), 5)
    assert await tokens(gateway, "completion") == 5000
