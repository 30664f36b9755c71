"""Routing policies, through the real server with fake engines."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vllm import Fake
from tests.gateway import Gateway, remote, running, settings_for

TURN = {"role": "user", "content": "x" * 600}


@asynccontextmanager
async def serving(policy: str, tmp_path: Path) -> AsyncIterator[tuple[Gateway, list[Fake]]]:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(Fake()) for _ in range(3)]
        engines = [remote(fake.url) for fake in fakes]
        model = {"name": "demo", "policy": policy, "engines": engines}
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
