"""Events and answers of chat completions as vLLM 0.32 writes them, for tests that compare bytes."""

import json
from typing import Any

from tests.fakes.completion_events import CREATED, FINGERPRINT, Reply, chat_events, data
from tests.fakes.generation import generate

LONG = 2048  # the fake's --max-model-len


def chunk(
    model: str, delta: dict[str, str], finish: str | None = None, *, index: int = 0, **more: Any
) -> bytes:
    """One event of a streamed chat completion, as vLLM writes it."""
    choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None}
    choice["finish_reason"] = finish
    first = "role" in delta
    if finish is not None:
        choice["stop_reason"] = None
    if not first:
        choice["token_ids"] = None
    ending = {"prompt_token_ids": None, "prompt_text": None} if first else {}
    head = {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": CREATED}
    return data({**head, "model": model, "choices": [choice], **more, **ending})


def chat_stream(model: str, *, choices: int = 1, usage: bool = False) -> list[bytes]:
    """The events of a streamed chat completion; with `usage`, the fingerprint moves (vLLM 0.32)."""
    made = generate("/v1/chat/completions", {"n": choices}, LONG, knows_ids=True)
    reply = Reply(model, usage=usage)
    return [event for event, _ in chat_events(reply, made) if event]


def completion(model: str, text: str) -> bytes:
    """A whole chat completion of two tokens."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text,
        "reasoning": None,
        "tool_calls": [],
    }
    return json.dumps(
        {
            "id": "chatcmpl-fake",
            "object": "chat.completion",
            "created": CREATED,
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2},
        }
    ).encode()


__all__ = ["FINGERPRINT", "chat_stream", "chunk", "completion"]
