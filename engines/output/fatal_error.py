"""Recognizes the errors with which vLLM's API server reports that its engine has died.

When EngineCore or a worker dies, the API server keeps responding to requests in flight and to new
ones: to a plain one with status 500, to a stream with one event and `[DONE]` (vLLM 0.32). The cause
is the engine's death, not the request. Standard library only.
"""

import re

# vllm.v1.engine.exceptions.EngineDeadError, since vLLM 0.8.
DEAD_ENGINE_TEXT = b"EngineCore encountered an issue"
ENGINE_DEAD_REASON = "its API server reports that the engine is dead"
# Events of errors in both dialects contain this; text of a model cannot: its quotes are escaped.
ERROR_EVENT = b'"error"'
_CHAT_DEATH = re.compile(rb'^data: \{"error"[^\n]*' + re.escape(DEAD_ENGINE_TEXT), re.MULTILINE)
# /v1/messages reads the events of a chat, and fails at the one above: its text, cut by pydantic.
_MESSAGES_ERROR = b'event: error\ndata: {"type":"error"'
_MESSAGES_TEXT = b"for ChatCompletionStreamResponse"
_MESSAGES_CAUSE = b"'message': '" + DEAD_ENGINE_TEXT[:2]


def reports_engine_death(body: bytes) -> bool:
    """Return whether the body of a response with status 5xx reports a dead engine."""
    return DEAD_ENGINE_TEXT in body


def find_engine_death(events: bytes) -> int | None:
    """Return the position of the event that reports a dead engine, None if there is none."""
    if death := _CHAT_DEATH.search(events):
        return death.start()
    at = events.find(_MESSAGES_ERROR)
    if at >= 0 and _MESSAGES_TEXT in events[at:] and _MESSAGES_CAUSE in events[at:]:
        return at
    return None
