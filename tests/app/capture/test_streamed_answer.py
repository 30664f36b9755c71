"""Streams that vLLM has written, put together."""

from typing import Any

import pytest

from app.capture.streamed_answer import join_events
from app.sse import DONE
from tests.app.continuation.streams import NAMES, event_of, recorded

TOOL = '{"city": "Paris"}'
THOUGHT = "I need the weather in Paris, so I call the tool."


def joined(name: str) -> dict[str, Any]:
    return join_events(b"".join(recorded(name)))


def test_chat_with_reasoning_and_a_tool_call() -> None:
    answer = joined("chat_tool_auto")
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["reasoning"] == THOUGHT
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("get_weather", TOOL)
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] == 36


def test_choices_are_apart() -> None:
    for name, texts in (
        ("chat_two_choices_reasoning", ["The train travels at 60 km per hour."] * 2),
        ("completions_two_choices", [" larg!!! How harbour is the capital of France?", None]),
    ):
        choices = joined(name)["choices"]
        for choice, text in zip(choices, texts, strict=True):
            found = choice.get("text") or choice["message"]["content"]
            assert text in (None, found)


def test_message_with_a_tool_call() -> None:
    answer = joined("messages_tool")
    thought, call = answer["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", THOUGHT)
    assert (call["name"], call["partial_json"]) == ("get_weather", TOOL)
    assert answer["stop_reason"] == "tool_use"


def test_response_is_its_last_event() -> None:
    answer = joined("responses_tool")
    assert "deltas" not in answer
    assert [item["type"] for item in answer["output"]] == [
        "reasoning",
        "function_call",
    ]
    cut = join_events(b"".join(recorded("responses_plain")[:-1]))
    assert "I am a tiny demo model." in str(cut)


@pytest.mark.parametrize("name", NAMES)
def test_stream_that_is_cut_anywhere(name: str) -> None:
    raw = b"".join(recorded(name))
    for end in range(0, len(raw), 509):
        join_events(raw[:end])


def test_error_in_a_stream() -> None:
    raw = b"".join(recorded("chat_plain")[:5]) + event_of({"error": {"code": "boom"}}) + DONE
    answer = join_events(raw)
    assert answer["error"] == {"code": "boom"}
    assert answer["choices"]


@pytest.mark.parametrize(
    "data",
    [
        b"[]", b"1", b'"x"', b"{", b'{"choices": 1}', b'{"choices": [1, {"delta": 2}]}',
        b'{"choices": [{"delta": {"content": {"a": 1}}}, {"delta": {"content": "x"}}]}',
        b'{"choices": [{"delta": {"content": "x"}}, {"delta": {"content": ["y"]}}]}',
        b'{"type": "message_delta"}', b'{"type": "content_block_delta", "delta": 1}',
        b'{"type": "x.delta", "delta": "y"}', b'{"response": {"output": 1}}', b"{}",
        b'{"choices": [{"index": [], "delta": {"tool_calls": [{"index": 0, "function": 1}]}}]}',
    ],
)  # fmt: skip
def test_events_of_another_shape(data: bytes) -> None:
    assert isinstance(join_events(b"data: %b\n\n" % data * 2), dict)
