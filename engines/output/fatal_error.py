"""What vLLM's API server says of an engine that is dead, as long as it goes on itself.

When EngineCore or a worker dies, requests under way and new ones are answered by the API server: a
plain one with status 500, a stream with one event and `[DONE]` (vLLM 0.32). That is the engine's
death and not the fault of any request. Standard library only.
"""

# vllm.v1.engine.exceptions.EngineDeadError, since vLLM 0.8.
DEAD = b"EngineCore encountered an issue"
TOLD = "its API server says that the engine is dead"
# A text of the model cannot hold this: quotes in it are escaped.
ERROR_EVENT = b'data: {"error"'


def tells_death(body: bytes) -> bool:
    """Whether a body of an answer with status 5xx says that the engine is dead."""
    return DEAD in body


def death_in(events: bytes) -> int | None:
    """Return where in these events of a stream the engine's death is told, None if it is not."""
    at = events.find(ERROR_EVENT)
    return at if at >= 0 and DEAD in events[at:] else None
