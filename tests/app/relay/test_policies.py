"""Routing policies, through the real server with fake engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.routing.prefix_affinity import MAX_RATIO, PrefixAffinity
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, remote, running, settings_for
from tests.waiting import wait_until

TURN = {"role": "user", "content": "x" * 600}


@asynccontextmanager
async def serving(
    policy: str, tmp_path: Path, **fields: Any
) -> AsyncIterator[tuple[Gateway, list[Fake]]]:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(Fake()) for _ in range(3)]
        engines = [remote(fake.url) for fake in fakes]
        model = {"name": "demo", "policy": policy, "engines": engines, **fields}
        settings = settings_for(model, run_dir=tmp_path)
        yield await stack.enter_async_context(running(settings)), fakes


def posts(fakes: list[Fake]) -> list[int]:
    return [sum(seen.method == "POST" for seen in fake.seen) for fake in fakes]


async def ask(gateway: Gateway, *headers: tuple[str, str], **fields: Any) -> None:
    body = {"model": "demo", "messages": [TURN], **fields}
    answer = await gateway.client.post("/v1/chat/completions", json=body, headers=dict(headers))
    assert answer.status_code == 200


async def test_round_robin_takes_turns(tmp_path: Path) -> None:
    async with serving("round_robin", tmp_path) as (gateway, fakes):
        for _ in range(6):
            await ask(gateway)
        assert posts(fakes) == [2, 2, 2]


async def test_session_header_keeps_one_engine(tmp_path: Path) -> None:
    async with serving("session", tmp_path) as (gateway, fakes):
        for _ in range(3):
            await ask(gateway, ("x-session-id", "one"), messages=[TURN, {"role": "user"}])
        assert sorted(posts(fakes)) == [0, 0, 3]
        for number in range(12):
            await ask(gateway, user=str(number))
        assert all(posts(fakes))
        for fake in fakes:
            assert not any(seen.header("x-session-id") for seen in fake.seen)


@pytest.mark.parametrize("policy", ["session", "prefix"])
async def test_session_leaves_an_engine_that_has_as_many_as_it_takes(
    policy: str, tmp_path: Path
) -> None:
    queue = {"max_in_flight": 1}
    async with serving(policy, tmp_path, queue=queue) as (gateway, fakes):
        for fake in fakes:
            fake.fault = "hang"
        asked = []
        for number in range(1, 3):
            asked.append(asyncio.create_task(ask(gateway)))
            await wait_until(lambda: sum(posts(fakes)) == number)  # noqa: B023 - awaited here
        assert sorted(posts(fakes)) == [0, 1, 1]
        for one in asked:
            one.cancel()
        await wait_until(lambda: in_flight(gateway) == [0, 0, 0])


async def test_conversation_keeps_one_engine(tmp_path: Path) -> None:
    async with serving("prefix", tmp_path) as (gateway, fakes):
        for turns in range(1, 6):
            await ask(gateway, messages=[TURN] * turns)
        assert sorted(posts(fakes)) == [0, 0, 5]


@pytest.mark.parametrize("policy", ["round_robin", "session", "prefix"])
async def test_dead_engine_is_skipped(policy: str, tmp_path: Path) -> None:
    async with serving(policy, tmp_path) as (gateway, fakes):
        await ask(gateway)
        [first] = [fake for fake in fakes if any(s.method == "POST" for s in fake.seen)]
        first.fault = "dead"
        for _ in range(4):
            await ask(gateway)
        assert sum(posts([fake for fake in fakes if fake is not first])) == 4


def in_flight(gateway: Gateway) -> list[int]:
    """Return the prompt tokens in flight at each engine."""
    [model] = gateway.state.catalogue.models
    return [replica.prefill.tokens for replica in model.replicas]


async def test_prompt_is_in_flight_until_the_first_token_of_its_stream(tmp_path: Path) -> None:
    async with serving("prefix", tmp_path) as (gateway, _fakes):
        body = {"model": "demo", "messages": [TURN], "stream": True, "fake": "pace:20"}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_raw())
            assert in_flight(gateway) == [0, 0, 0]


async def test_prompt_in_flight_is_no_longer_than_the_model_takes(tmp_path: Path) -> None:
    """The bytes of an image are no tokens."""
    async with serving("prefix", tmp_path) as (gateway, fakes):
        for fake in fakes:
            fake.fault = "hang"
        image = {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + "A" * 900_000},
        }
        asked = asyncio.create_task(ask(gateway, messages=[{"role": "user", "content": [image]}]))
        await wait_until(lambda: sum(posts(fakes)) == 1)
        [model] = gateway.state.catalogue.models
        assert sum(in_flight(gateway)) == model.max_model_len
        asked.cancel()
        await wait_until(lambda: in_flight(gateway) == [0, 0, 0])


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_of_a_client_that_leaves_is_in_flight_no_longer(
    stream: bool, tmp_path: Path
) -> None:
    async with serving("prefix", tmp_path) as (gateway, fakes):
        for fake in fakes:
            fake.fault = "hang"
        left = asyncio.create_task(ask(gateway, stream=stream))
        await wait_until(lambda: sum(posts(fakes)) == 1)
        assert sorted(in_flight(gateway)) == [0, 0, 128]
        left.cancel()
        await wait_until(lambda: in_flight(gateway) == [0, 0, 0])


@pytest.mark.parametrize("stream", [False, True])
async def test_policy_learns_what_the_engine_reported(stream: bool, tmp_path: Path) -> None:
    async with serving("prefix", tmp_path) as (gateway, _fakes):
        [model] = gateway.state.catalogue.models
        assert isinstance(model.policy, PrefixAffinity)
        await ask(gateway, fake="tokens:500:0", stream=stream)
        [table] = [table for table in model.policy._tables.values() if len(table)]
        [(_, answer)] = table._tails.values()
        assert answer == 500 * MAX_RATIO  # a prompt of three tokens


async def test_prompt_is_in_flight_only_where_it_was_sent_last(tmp_path: Path) -> None:
    async with serving("prefix", tmp_path) as (gateway, fakes):
        await ask(gateway)
        [first] = [fake for fake in fakes if any(s.method == "POST" for s in fake.seen)]
        first.fault = "dead"
        await ask(gateway, messages=[TURN, TURN])
        assert sum(posts(fakes)) == 3
        assert in_flight(gateway) == [0, 0, 0]


async def test_keys_know_nothing_of_prompts_of_others(tmp_path: Path) -> None:
    """A prompt that an engine has cached for one key is computed anew for another."""
    async with serving("prefix", tmp_path) as (gateway, fakes):
        given = {"name": "other"}
        made = (await gateway.client.post("/admin/keys", json=given, headers=ROOT)).json()
        other = ("authorization", f"Bearer {made['key']}")
        await ask(gateway)
        for fake in fakes:
            fake.fault = "hang"
        expected = {(): [0, 0, 0], (other,): [0, 0, 128]}
        for number, (headers, tokens) in enumerate(expected.items(), start=2):
            task = asyncio.create_task(ask(gateway, *headers))
            await wait_until(lambda: sum(posts(fakes)) == number)  # noqa: B023 - awaited here
            assert sorted(in_flight(gateway)) == tokens
            task.cancel()
            await wait_until(lambda: in_flight(gateway) == [0, 0, 0])
