"""A stream whose engine dies at any token goes on at another engine, as if nothing had happened."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.app.relay.continuing import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Stream,
    Streams,
    streaming,
    without_run,
)

THOUGHT = "<think>one two</think>three four"
SECOND_THOUGHT = "<think>one</think>two <think>three four</think>five six"
CALL = 'see <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
GREEDY: dict[str, Any] = {"temperature": 0}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
SCHEMA = {"type": "json_object"}

# Streams that are replayed: their bytes are those of an undisturbed stream, ID and time aside.
REPLAYED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": (CHAT, "one two three", {}),
    "greedy": (CHAT, "one two three", GREEDY),
    "seeded and greedy": (CHAT, "one two three", {"seed": 7, **GREEDY}),
    "usage": (CHAT, "one two three", USAGE),
    "usage of every chunk": (
        CHAT, "one two", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    ),
    "reasoning": (CHAT, THOUGHT, {}),
    "reasoning with usage": (CHAT, THOUGHT, USAGE),
    "chinese": (CHAT, "海上的灯塔", {}),
    "emoji": (CHAT, "a😀b", {}),
    "chinese thought": (CHAT, "<think>灯塔</think>海上", USAGE),
    "limit": (CHAT, "one two three four", {"max_tokens": 3, **USAGE}),
    "both limits": (CHAT, "one two three", {"max_completion_tokens": 2, "min_tokens": 1}),
    "tools that are not called": (CHAT, "one two three", {"tools": TOOLS, **GREEDY}),
    "completions": (COMPLETIONS, "one two three", {}),
    "completions with usage": (COMPLETIONS, "one two 灯", USAGE),
    "completions to the default limit": (COMPLETIONS, "word " * 20, {"max_tokens": None, **USAGE}),
    "completions with a limit": (COMPLETIONS, "one two three", {"max_tokens": 2}),
}  # fmt: skip
# Streams that are generated again: what a client puts together is the same.
VERIFIED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tool call": (CHAT, CALL, {"tools": TOOLS, **GREEDY}),
    "tool call with usage": (CHAT, CALL, {"tools": TOOLS, **GREEDY, **USAGE}),
    "two choices, seeded": (CHAT, "one two||three 灯 four", {"n": 2, "seed": 7}),
    "two choices with usage": (CHAT, "one||two three", {"n": 2, **GREEDY, **USAGE}),
    "two completions": (COMPLETIONS, "one two||three", {"n": 2, **GREEDY}),
    "second thought": (CHAT, SECOND_THOUGHT, GREEDY),
    "stop": (CHAT, THOUGHT, {"stop": ["x"], **GREEDY}),
    "schema": (CHAT, '{"a": 灯}', {"response_format": SCHEMA, **GREEDY}),
    "penalties": (CHAT, "one two", {"frequency_penalty": 0.5, **GREEDY}),
    "message": (MESSAGES, THOUGHT, GREEDY),
    "chinese message": (MESSAGES, "海上灯", {**GREEDY, "max_tokens": 9}),
    "message with a tool call": (MESSAGES, CALL, GREEDY),
    "response": (RESPONSES, THOUGHT, GREEDY),
    "response with a tool call": (RESPONSES, CALL, {**GREEDY, "max_output_tokens": 90}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Streams]:
    async with streaming(tmp_path_factory.mktemp("shared")) as streams:
        yield streams


@pytest_asyncio.fixture(loop_scope="module")
async def streams(shared: Streams) -> AsyncIterator[Streams]:
    """The gateway that the tests of this file share; each leaves nothing behind."""
    shared.heal()
    yield shared
    shared.heal()
    await shared.at_rest()


async def interrupted(
    streams: Streams, kind: str, path: str, say: str, fields: dict[str, Any]
) -> AsyncIterator[tuple[int, Stream]]:
    """Yield the stream of a request whose first engine fails after 0, 1, 2, … tokens."""
    after = 0
    while True:
        fault = streams.fail(kind, after)
        stream = await streams.ask(path, say, **fields)
        if not fault._happened:
            assert after > 2
            return
        yield after, stream
        after += 1


def is_whole(stream: Stream, undisturbed: Stream) -> None:
    """Assert that a stream cannot be told from an undisturbed one."""
    assert stream.error is None
    assert stream.answer.whole
    assert stream.text == undisturbed.text
    assert stream.body.count(b"[DONE]") == undisturbed.body.count(b"[DONE]")
    assert stream.record.usage == undisturbed.record.usage
    assert (stream.record.status, stream.record.outcome) == (200, "completed")
    assert stream.record.not_continued is None


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.asyncio(loop_scope="module")
async def test_replayed_stream_is_byte_for_byte_an_undisturbed_one(
    streams: Streams, name: str
) -> None:
    path, say, fields = REPLAYED[name]
    undisturbed = await streams.ask(path, say, **fields)
    assert undisturbed.record.continued == 0
    before = await streams.metric("replay", "continued")
    count = 0
    async for after, stream in interrupted(streams, "close", path, say, fields):
        if stream.error is not None:  # only the usage that the client asked for is missing
            assert stream.record.not_continued == "finished"
            assert undisturbed.bytes.startswith(stream.bytes.rpartition(b"data: ")[0])
            assert b'"finish_reason":"' in stream.body
            continue
        is_whole(stream, undisturbed)
        assert stream.bytes == undisturbed.bytes or b'"finish_reason":"' in stream.body
        assert stream.record.continued == 1
        assert stream.record.recomputed_tokens in (0, *range(1 + after, 5 + after))
        count += 1
    assert count > 2
    assert await streams.metric("replay", "continued") >= before + count - 1


@pytest.mark.parametrize("name", VERIFIED)
@pytest.mark.asyncio(loop_scope="module")
async def test_verified_stream_is_the_same_answer(streams: Streams, name: str) -> None:
    path, say, fields = VERIFIED[name]
    undisturbed = await streams.ask(path, say, **fields)
    count = 0
    async for _, stream in interrupted(streams, "close", path, say, fields):
        is_whole(stream, undisturbed)
        assert stream.record.continued == 1
        count += 1
    assert count > 2


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(1, 3), (2,), (5, 1)])
@pytest.mark.parametrize("name", REPLAYED | VERIFIED)
@pytest.mark.asyncio(loop_scope="module")
async def test_tokens_that_arrive_together_are_the_same_answer(
    streams: Streams, name: str, widths: tuple[int, ...]
) -> None:
    """As vLLM puts them together for a slow reader: a chunk may end inside a character."""
    path, say, fields = (REPLAYED | VERIFIED)[name]
    undisturbed = await streams.ask(path, say, **fields)
    for fake in streams.fakes:
        fake.widths = widths
    async for _, stream in interrupted(streams, "close", path, say, fields):
        if stream.error is not None:
            assert stream.record.not_continued == "finished"
            continue
        if "continuous_usage_stats" in str(fields):
            assert stream.text[0] == undisturbed.text[0]
            continue
        if stream.record.recomputed_tokens or stream.record.usage is None:
            is_whole(stream, undisturbed)
        else:  # its last engine was asked nothing: tokens of the thought are counted by chunks
            assert (stream.text, stream.tokens) == (undisturbed.text, undisturbed.tokens)


@pytest.mark.parametrize("kind", ["close", "reset", "cut", "error"])
@pytest.mark.parametrize("name", ["chat", "stop", "completions", "message"])
@pytest.mark.asyncio(loop_scope="module")
async def test_death_of_every_kind_is_continued(streams: Streams, kind: str, name: str) -> None:
    path, say, fields = (REPLAYED | VERIFIED)[name]
    undisturbed = await streams.ask(path, say, **fields)
    async for _, stream in interrupted(streams, kind, path, say, fields):
        is_whole(stream, undisturbed)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("say", ["one two 灯 three", THOUGHT])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        USAGE,
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"include_usage": False}},
        {"return_token_ids": True},
        {"tools": TOOLS},
        {"n": 2, **GREEDY},
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_undisturbed_stream_has_the_bytes_of_a_direct_call(
    streams: Streams, path: str, say: str, fields: dict[str, Any]
) -> None:
    through = await streams.ask(path, say, **fields)
    [sent] = streams.posts(path)
    body = {**sent, "stream_options": None, "return_token_ids": None, **fields}
    async with httpx.AsyncClient() as direct:
        straight = await direct.post(f"{streams.fakes[0].url}{path}", json=body)
    assert through.bytes == without_run(straight.content)


@pytest.mark.asyncio(loop_scope="module")
async def test_clients_own_ids_go_on(streams: Streams) -> None:
    fields: dict[str, Any] = {"return_token_ids": True}
    undisturbed = await streams.ask(**fields)
    assert b'"prompt_token_ids":[' in undisturbed.body
    async for _, stream in interrupted(streams, "close", CHAT, "one two three", fields):
        is_whole(stream, undisturbed)
        assert stream.bytes == undisturbed.bytes or b'"finish_reason":"' in stream.body
