"""Streams whose engine fails, and what goes wrong after that, through the real server."""

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.continuation import answer_text
from app.relay import continuation, model_request
from app.relay.billing import billed_usage
from app.relay.request_context import RequestContext
from app.sse import COMMENT
from app.usage import Usage
from tests.app.raw import connected, request
from tests.fakes.stream_faults import BEHIND_END, StreamFault
from tests.fakes.vllm import Fake, Seen
from tests.gateway import Gateway, remote, running, settings_for
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
TEXT = "say:one two three four five six seven eight nine ten"
DONE = b"data: [DONE]\n\n"


@dataclass
class Pair:
    """A gateway whose model has two engines."""

    gateway: Gateway
    first: Fake
    second: Fake

    async def stream(self, path: str = CHAT, **fields: Any) -> bytes:
        """Return the bytes of a stream that begins at the first engine."""
        replicas = self.gateway.state.catalogue.models[0].replicas
        replicas[1].in_flight += 1  # busier, so the first is chosen
        opened = asyncio.create_task(self.read(path, **fields))
        await wait_until(
            lambda: opened.done() or any(seen.target == path for seen in self.first.seen)
        )
        replicas[1].in_flight -= 1
        return await asyncio.wait_for(opened, PATIENCE_S)

    async def read(self, path: str = CHAT, **fields: Any) -> bytes:
        """Return the bytes of a stream, as far as it came."""
        body = _body(path, **fields)
        async with self.gateway.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            data = b""
            with contextlib.suppress(httpx.TransportError):  # closed after an error event
                async for piece in response.aiter_raw():
                    data += piece
            return data

    async def direct(self, path: str = CHAT, **fields: Any) -> bytes:
        """Return the bytes of an undisturbed stream."""
        async with Fake() as fake, asyncio.timeout(PATIENCE_S):
            fake.widths, fake.parses = self.first.widths, self.first.parses
            fake.fault = self.first.fault
            url = f"{fake.url}{path}"
            async with httpx.AsyncClient() as client:
                return (await client.post(url, json=_body(path, **fields))).content

    async def at_rest(self) -> None:
        """Nothing may be held when no request is under way."""
        state = self.gateway.state
        await asyncio.wait_for(state.admission.wait_until_idle(), PATIENCE_S)
        replicas = [r for model in state.catalogue.models for r in model.replicas]
        assert [r.in_flight for r in replicas] == [0] * len(replicas)
        assert not any(r.streams for r in replicas)
        await self.first.until_idle()
        await self.second.until_idle()

    async def counted(self, way: str, outcome: str) -> float:
        return await self.gateway.metric(
            "gateway_continuations_total", model="demo", way=way, outcome=outcome
        )


def _body(path: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    if path == "/v1/completions":
        prompt = {"prompt": "hi"}
    return {"model": "demo", "stream": True, **prompt, **fields}


@asynccontextmanager
async def pair(
    tmp_path: Path, *more: dict[str, Any], model: dict[str, Any] | None = None, **sections: Any
) -> AsyncIterator[Pair]:
    async with Fake(fault=TEXT) as first, Fake(fault=TEXT) as second:
        engines = [remote(first.url), remote(second.url)]
        demo = {"name": "demo", "engines": engines, **(model or {})}
        async with running(settings_for(demo, *more, run_dir=tmp_path, **sections)) as gateway:
            yield Pair(gateway, first, second)


def events(stream: bytes) -> list[dict[str, Any]]:
    found = [line[6:] for line in stream.splitlines() if line.startswith(b"data: {")]
    return [json.loads(data) for data in found]


def chats(fake: Fake) -> list[Seen]:
    """Return the chats that an engine got."""
    return [seen for seen in fake.seen if seen.target == CHAT]


def token_ids(stream: bytes) -> list[int]:
    return [
        token
        for event in events(stream)
        for choice in event.get("choices", ())
        for token in choice.get("token_ids") or ()
    ]


async def test_stream_goes_on_with_the_bytes_of_a_direct_call(tmp_path: Path) -> None:
    async with pair(tmp_path) as setup:
        setup.first.stream_fault = StreamFault("close", 3)
        assert await setup.stream() == await setup.direct()
        await setup.at_rest()
        assert await setup.counted("replay", "continued") == 1


async def test_connection_that_breaks_behind_done_is_no_second_end(tmp_path: Path) -> None:
    async with pair(tmp_path) as setup:
        setup.first.stream_fault = StreamFault("close", BEHIND_END)
        got = await setup.stream()
        assert got == await setup.direct()
        await setup.at_rest()


@pytest.mark.parametrize("tokens", range(6))
async def test_client_that_asked_for_ids_gets_each_once(tmp_path: Path, tokens: int) -> None:
    fields: dict[str, Any] = {"return_token_ids": True}
    async with pair(tmp_path) as setup:
        setup.first.fault = setup.second.fault = "say:a 你好世界"
        setup.first.stream_fault = StreamFault("close", tokens)
        got = await setup.stream(**fields)
        whole = token_ids(await setup.direct(**fields))
        if got.endswith(DONE):
            assert token_ids(got) == whole
        else:
            assert whole[: len(token_ids(got))] == token_ids(got)


async def test_answer_that_is_no_stream_is_not_put_into_one(tmp_path: Path) -> None:
    async with pair(tmp_path) as setup:
        setup.first.stream_fault = StreamFault("close", 3)
        setup.second.fault = "headers"
        got = await setup.stream()
        assert b"data: {}\n\n" not in got
        assert await setup.counted("replay", "refused") == 1
        await setup.at_rest()


@pytest.mark.parametrize("fault", ["hang", "status:503"])
async def test_wait_ends_at_an_engine_that_never_takes_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(answer_text, "DECODE_S", 0.05)
    monkeypatch.setattr(continuation, "RETRY_S", 0.01)
    async with pair(tmp_path, model={"continuation_wait_s": 0.3}) as setup:
        setup.first.widths = (3,)  # the end of a chunk's text is asked for
        setup.first.stream_fault = StreamFault("close", 3)
        setup.second.fault = fault
        assert b"engine failed" in await setup.stream()
        assert await setup.counted("replay", "no_replica") == 1
        await setup.at_rest()


async def test_request_under_which_two_engines_died_is_not_continued(tmp_path: Path) -> None:
    async with Fake("spare") as third, Fake("spare") as fourth:
        spare = {"name": "spare", "engines": [remote(third.url), remote(fourth.url)]}
        third.fault = fourth.fault = TEXT
        third.stream_fault = fourth.stream_fault = StreamFault("close", 2, times=None)
        async with pair(tmp_path, spare, model={"fallbacks": ["spare"]}) as setup:
            setup.first.fault = setup.second.fault = "close"
            assert b"engine failed" in await setup.read()
            fakes = (setup.first, setup.second, third, fourth)
            assert [len(chats(fake)) for fake in fakes[:2]] == [1, 1]
            assert sum(len(chats(fake)) for fake in fakes[2:]) == 1


async def test_stream_that_lacks_its_end_mark_ends_with_the_bytes_of_a_direct_call(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as setup:
        whole = await setup.stream()
        setup.first.stream_fault = StreamFault("close", 11)
        assert await setup.stream() == whole == await setup.direct()
        assert len(chats(setup.second)) == 0


async def test_interrupted_request_is_freed_without_a_garbage_collection(tmp_path: Path) -> None:
    async with pair(tmp_path) as setup:
        gc.collect()
        gc.freeze()  # what there is already is not looked at again
        gc.disable()
        try:
            for second in (None, StreamFault("close", 3)):
                setup.first.stream_fault = StreamFault("close", 4)
                setup.second.stream_fault = second
                await setup.stream()
            await setup.at_rest()
            assert not any(isinstance(one, RequestContext) for one in gc.get_objects())
        finally:
            gc.enable()


async def test_comments_are_not_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of three tokens falls silent; its client gets comments, and leaves."""
    async with pair(tmp_path, server={"sse_keepalive_s": 0.005}) as setup:
        usage: list[Usage | None] = []
        monkeypatch.setattr(model_request, "billed_usage", _noting(usage))
        for fake in (setup.first, setup.second):
            fake.stream_fault = StreamFault("stall", 3)
        async with connected(setup.gateway) as client:
            client.send(request(json.dumps(_body(CHAT)).encode(), path=CHAT.encode()))
            for _ in range(30):
                await client.until(COMMENT)
        await setup.at_rest()
        [billed] = usage
        assert billed is not None
        assert billed.completion == 3


def _noting(usage: list[Usage | None]) -> Callable[..., Usage | None]:
    def bill(*args: Any, **fields: Any) -> Usage | None:
        usage.append(billed_usage(*args, **fields))
        return usage[-1]

    return bill
