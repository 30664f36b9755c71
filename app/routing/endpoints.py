"""The endpoints that an engine serves, by the tasks that it reports for its model. Pure.

vLLM registers only the routes of a model's tasks, so any other path is 404 there. What is uncertain
counts as served: the engine's own response is right in any case.
"""

from collections.abc import Iterable
from functools import lru_cache

_GENERATION = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/chat/completions/batch",
)  # fmt: skip
_SPEECH = ("/v1/audio/transcriptions", "/v1/audio/translations")
_SCORES = ("/v1/rerank", "/v1/score", "/rerank", "/score")
# Every engine with a tokenizer has these, whatever its model's tasks; the last one with the flag
# --enable-tokenizer-info-endpoint.
_ALWAYS = ("/tokenize", "/detokenize", "/tokenizer_info")
# Task names of vLLM 0.7 to 0.33. Any output of a pooling model can be turned into scores.
ENDPOINTS: dict[str, tuple[str, ...]] = {
    "generate": _GENERATION,
    "transcription": _SPEECH,
    "realtime": _SPEECH,
    "speech": ("/v1/audio/speech",),  # of vllm-omni, which has no task for its images
    "embed": ("/v1/embeddings", *_SCORES, "/pooling"),
    "embedding": ("/v1/embeddings", *_SCORES, "/pooling"),
    "classify": ("/classify", *_SCORES, "/pooling"),
    "score": ("/classify", *_SCORES, "/pooling"),
    "reward": ("/pooling",),
    "encode": ("/pooling", *_SCORES),
    "token_embed": ("/pooling", *_SCORES),
    "token_classify": ("/pooling",),
    "embed&token_classify": ("/v1/embeddings", *_SCORES, "/pooling"),
    "plugin": ("/pooling",),
    "render": (),
}
# Left out of error messages: second names, and paths of no use alone.
_UNLISTED = frozenset(
    {"/v1/messages/count_tokens", "/v1/chat/completions/batch", "/rerank", "/score", *_ALWAYS}
)


@lru_cache
def endpoints_of(tasks: tuple[str, ...]) -> frozenset[str] | None:
    """Return the endpoints of an engine whose model has these tasks; None: unknown."""
    if not tasks or any(task not in ENDPOINTS for task in tasks):
        return None
    return frozenset(path for task in tasks for path in ENDPOINTS[task]).union(_ALWAYS)


def list_endpoints(tasks: Iterable[str]) -> list[str]:
    """Return the endpoints of these tasks for an error message, in the table's order."""
    wanted = set(tasks)
    found = (path for task, paths in ENDPOINTS.items() if task in wanted for path in paths)
    return [path for path in dict.fromkeys(found) if path not in _UNLISTED]
