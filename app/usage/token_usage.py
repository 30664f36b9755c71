"""Parses the token usage of a response, for every API dialect that vLLM serves.

OpenAI chat, completions, embeddings  usage.{prompt,completion,total}_tokens, *_tokens_details
OpenAI responses                      [response.]usage.{input,output}_tokens, *_tokens_details
Anthropic messages                    [message.]usage.{input,output,cache_*_input}_tokens
Cohere rerank                         usage.total_tokens
OpenAI transcriptions                 usage.seconds, of audio
the same and translations, verbose    duration, in seconds of audio; they have no usage
"""

import math
import re
from typing import Annotated

import msgspec

# Matches a usage object, not `"usage": null`. Inside a JSON string the quotes would be escaped, so
# text from a model never matches.
HOLDS_USAGE = re.compile(rb'"usage"\s*:\s*\{')
# Maximum size of a response that is parsed whole. A longer one (a batch of embeddings, the logprobs
# of a long prompt) is searched in passing, in windows that overlap by more than a usage object.
WHOLE_BYTES = 1024 * 1024
WINDOW_BYTES = 4096
# As in English.
BYTES_PER_TOKEN = 4
# As OpenAI's transcription counts.
TOKENS_PER_SECOND = 10


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one request. `cached` is part of `prompt`, `reasoning` part of `completion`."""

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0
    estimated: bool = False  # estimated by the gateway, since the engine reported none

    def merged(self, later: "Usage") -> "Usage":
        """Return the maximum of both; in a stream the numbers only grow."""
        return Usage(
            max(self.prompt, later.prompt),
            max(self.completion, later.completion),
            max(self.cached, later.cached),
            max(self.reasoning, later.reasoning),
        )


def estimate_prompt(size: int, longest: int | None) -> int:
    """Return the estimated tokens of a request of `size` bytes.

    At most the model's maximum, if it is known.
    """
    tokens = size // BYTES_PER_TOKEN
    return tokens if longest is None or tokens <= longest else longest


# The integers that a float, as in metrics, represents exactly.
_Count = Annotated[int, msgspec.Meta(ge=-(2**53) + 1, le=2**53 - 1)]
# Errors of parsing a response. Some responses echo a client's own JSON.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None
    reasoning_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    total_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None
    seconds: _Count | None = None


class _Inner(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    response: _Inner | None = None  # an event of a streamed response
    message: _Inner | None = None  # the first event of a streamed message
    duration: object = None  # seconds of audio in a transcript


_answer = msgspec.json.Decoder(_Answer)
_usage = msgspec.json.Decoder(_Usage)
_OBJECT = re.compile(rb"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")


def read_usage(body: bytes) -> Usage | None:
    """Return the usage in a JSON document, a response or an event; None if it has none."""
    try:
        answer = _answer.decode(body)
    except UNREADABLE:
        return None  # of another shape, or no JSON
    if answer.usage is not None:
        return _read(answer.usage)
    inner = answer.response or answer.message
    if inner is not None:
        return None if inner.usage is None else _read(inner.usage)
    return _of_audio(answer.duration)


def _of_audio(duration: object) -> Usage | None:
    """Return the usage of so many seconds of audio; vLLM writes a number, OpenAI wrote text."""
    if not isinstance(duration, int | float | str) or isinstance(duration, bool):
        return None
    try:
        seconds = float(duration)
    except (ValueError, OverflowError):
        return None
    return Usage(math.ceil(seconds) * TOKENS_PER_SECOND, 0) if 0 <= seconds < 2**40 else None


def read_usage_in(tail: bytes) -> Usage | None:
    """Return the last usage in the tail of a document that is too long to parse."""
    found = None
    for found in HOLDS_USAGE.finditer(tail):  # noqa: B007 - the last one is wanted
        pass
    if found is None or (whole := _OBJECT.match(tail, found.end() - 1)) is None:
        return None
    try:
        return _read(_usage.decode(whole[0]))
    except UNREADABLE:
        return None


def _read(said: _Usage) -> Usage | None:
    if said.input_tokens is not None or said.output_tokens is not None:
        return _read_inputs(said)
    completion = said.completion_tokens or 0
    prompt = said.prompt_tokens
    if prompt is None:
        if said.total_tokens is None:
            seconds = said.seconds
            return None if seconds is None else Usage(max(seconds, 0) * TOKENS_PER_SECOND, 0)
        prompt = said.total_tokens - completion
    details, completion_details = said.prompt_tokens_details, said.completion_tokens_details
    if details is None and completion_details is None and prompt >= 0 <= completion:
        return Usage(prompt, completion)
    return _bounded(prompt, completion, details, completion_details)


def _read_inputs(said: _Usage) -> Usage:
    prompt, completion = said.input_tokens or 0, said.output_tokens or 0
    if said.cache_read_input_tokens is not None or said.cache_creation_input_tokens is not None:
        # Anthropic's input_tokens exclude the cached ones.
        cached = said.cache_read_input_tokens or 0
        prompt += cached + (said.cache_creation_input_tokens or 0)
        return _bounded(prompt, completion, _Details(cached), None)
    return _bounded(prompt, completion, said.input_tokens_details, said.output_tokens_details)


def _bounded(
    prompt: int, completion: int, prompt_details: _Details | None, details: _Details | None
) -> Usage:
    cached = (prompt_details.cached_tokens if prompt_details else None) or 0
    reasoning = (details.reasoning_tokens if details else None) or 0
    if 0 <= cached <= prompt and 0 <= reasoning <= completion:
        return Usage(prompt, completion, cached, reasoning)
    prompt, completion = max(prompt, 0), max(completion, 0)
    return Usage(
        prompt, completion, min(max(cached, 0), prompt), min(max(reasoning, 0), completion)
    )
