"""Which endpoints an engine serves, by the tasks that it says its model has. Pure.

vLLM registers the routes of a model's tasks alone, so any other is 404 there. What is not certain
counts as served: the engine's own answer is right in any case.
"""

from collections.abc import Iterable
from functools import lru_cache

_GENERATION = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens",
)  # fmt: skip
_SPEECH = ("/v1/audio/transcriptions", "/v1/audio/translations")
_SCORES = ("/v1/rerank", "/v1/score", "/rerank", "/score")
# Every engine with a tokenizer has these, whatever its model is for.
_ALWAYS = ("/tokenize", "/detokenize")
# The names of vLLM 0.7 to 0.33. A score may be made of any of what a pooling model returns.
ENDPOINTS: dict[str, tuple[str, ...]] = {
    "generate": _GENERATION,
    "transcription": _SPEECH,
    "realtime": _SPEECH,
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
# Left out where a client is told what there is: they are of no use alone, or are there twice.
_UNNAMED = frozenset({"/v1/messages/count_tokens", "/rerank", "/score", *_ALWAYS})


@lru_cache
def endpoints_of(tasks: tuple[str, ...]) -> frozenset[str] | None:
    """Return the endpoints of an engine whose model has these tasks; None: not known."""
    if not tasks or any(task not in ENDPOINTS for task in tasks):
        return None
    return frozenset(path for task in tasks for path in ENDPOINTS[task]).union(_ALWAYS)


def named(tasks: Iterable[str]) -> list[str]:
    """Return the endpoints to tell a client of who asked for another, in the table's order."""
    wanted = set(tasks)
    found = (path for task, paths in ENDPOINTS.items() if task in wanted for path in paths)
    return [path for path in dict.fromkeys(found) if path not in _UNNAMED]
