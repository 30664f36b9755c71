"""Models with `reasoning_field: both`: `reasoning_content` beside `reasoning`."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.relay.reasoning_field import BothFieldsMeter, with_reasoning_content
from app.usage import StreamMeter
from tests.app.relay.continuing import COMPLETIONS, Streams, streaming
from tests.app.relay.test_continuation import interrupted, is_whole

THOUGHT = '<think>one "two"</think>three four'
BOTH = {"reasoning_field": "both"}


@pytest.mark.parametrize(
    "message",
    [
        {"reasoning": 'a "b", \\ c', "content": None},
        {"content": "x", "reasoning": None},
        {"content": '{"reasoning":"no member"}', "tool_calls": [{"arguments": '{"reasoning":1}'}]},
        {"content": "reasoning"},
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_member_is_copied_and_text_is_not(
    message: dict[str, Any], separators: tuple[str, str]
) -> None:
    body = json.dumps({"choices": [{"message": message}]}, separators=separators).encode()
    wanted = dict(message)
    if "reasoning" in message:
        wanted["reasoning_content"] = message["reasoning"]
    both = with_reasoning_content(body)
    assert json.loads(both)["choices"][0]["message"] == wanted
    assert with_reasoning_content(both) == both


def test_added_bytes_do_not_count_as_tokens() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"reasoning":"%s"}}]}\n\n' % (b"x" * 4000)
    plain, both = StreamMeter(), BothFieldsMeter()
    sent = [len(meter.pass_on(event)) for meter in (plain, both)]
    assert sent[1] > sent[0] + 4000
    assert plain.so_far(1, sent[0]) == both.so_far(1, sent[1])


def reasoning_of(streams: bytes) -> list[dict[str, Any]]:
    """Return the deltas of a stream that have either field."""
    events = [line[6:] for line in streams.split(b"\n") if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return [delta for delta in deltas if delta.keys() & {"reasoning", "reasoning_content"}]


@pytest.mark.slow
async def test_streams_and_answers_have_both_fields_after_an_engines_death_too(
    tmp_path: Path,
) -> None:
    async with streaming(tmp_path, model=BOTH) as streams:
        undisturbed = await streams.ask(say=THOUGHT)
        deltas = reasoning_of(undisturbed.body)
        assert "".join(delta["reasoning"] or "" for delta in deltas) == 'one "two"'
        assert all(delta["reasoning"] == delta["reasoning_content"] for delta in deltas)
        async for _, stream in interrupted(streams, "close", "/v1/chat/completions", THOUGHT, {}):
            is_whole(stream, undisturbed)
            deltas = reasoning_of(stream.body)
            assert all(delta["reasoning"] == delta["reasoning_content"] for delta in deltas)
        await plain_answer_has_both_fields(streams)
        text = await streams.ask(COMPLETIONS, '{"reasoning":"x"}')
        assert b"reasoning_content" not in text.body


async def plain_answer_has_both_fields(streams: Streams) -> None:
    streams.heal()
    for fake in streams.fakes:
        fake.fault = f"say:{THOUGHT}"
    answer = await streams.gateway.chat()
    [choice] = answer.json()["choices"]
    assert choice["message"]["reasoning"] == 'one "two"'
    assert choice["message"]["reasoning_content"] == 'one "two"'
    assert answer.json()["usage"]["completion_tokens"] > 0
