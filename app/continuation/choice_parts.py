"""Reads the parts of a chunk of chat or completions: an event with choices. Pure."""

from collections.abc import Iterator
from typing import Any

import msgspec

from app.continuation.parts import STREAM, Channel, Part, Place, list_tokens, make_atom


class _Strict(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Decoding fails for members that are not named here: they are read as atoms."""


class _Function(_Strict):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(_Strict):
    index: int = 0
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class _Delta(_Strict):
    role: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(_Strict):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Chunk(_Strict):
    choices: list[_Choice] = []
    id: str | None = None
    object: str | None = None
    created: int | None = None
    model: str | None = None
    usage: dict[str, Any] | None = None
    system_fingerprint: str | None = None
    metrics: Any = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


_chunk = msgspec.json.Decoder(_Chunk)


def read_chunk(data: bytes) -> list[Part]:
    """Return the parts of a chunk, in the order in which they are generated.

    Raises one of `UNREADABLE` if it is no such chunk.
    """
    unknown: list[Part] = []
    try:
        chunk = _chunk.decode(data)
    except msgspec.ValidationError:
        document = msgspec.json.decode(data)
        unknown = list(_take_unknown(document))
        chunk = msgspec.convert(document, _Chunk)
    parts = [part for part in unknown if part.channel == STREAM]
    # They are in the first chunk only.
    if chunk.prompt_token_ids is not None:
        place = ("prompt_token_ids",)
        parts.append(make_atom(STREAM, "prompt_token_ids", chunk.prompt_token_ids, place))
    if chunk.prompt_text is not None:
        parts.append(make_atom(STREAM, "prompt_text", chunk.prompt_text, ("prompt_text",)))
    for position, choice in enumerate(chunk.choices):
        parts += [part for part in unknown if part.channel == choice.index]
        parts += _read_choice(position, choice)
    if not chunk.choices and chunk.usage is not None:
        parts.append(Part(STREAM, "usage"))
    return parts


def _read_choice(position: int, choice: _Choice) -> list[Part]:
    index, at = choice.index, ("choices", position)
    parts: list[Part] = []
    if choice.prompt_token_ids is not None:
        value, place = choice.prompt_token_ids, (*at, "prompt_token_ids")
        parts.append(make_atom(index, "prompt_token_ids", value, place))
    if choice.text:
        parts.append(Part(index, "text", choice.text, (), ((*at, "text"),)))
    if choice.delta is not None:
        _read_delta(index, (*at, "delta"), choice.delta, parts)
    if choice.token_ids:
        parts.append(list_tokens(index, "token_ids", choice.token_ids))
    if choice.logprobs is not None and (tokens := _logprob_tokens(choice.logprobs)):
        parts.append(list_tokens(index, "logprobs", tokens))
    if choice.finish_reason is not None:
        parts.append(Part(index, f"finish_reason {choice.finish_reason} {choice.stop_reason!r}"))
    return parts


def _read_delta(index: int, at: Place, delta: _Delta, parts: list[Part]) -> None:
    if delta.role is not None:
        parts.append(Part(index, f"role {delta.role}", None, (), ((*at, "role"),)))
    twice = delta.reasoning == delta.reasoning_content  # one text under two names
    if delta.reasoning:
        places: tuple[Place, ...] = ((*at, "reasoning"),)
        if twice:
            places += ((*at, "reasoning_content"),)
        parts.append(Part(index, "reasoning", delta.reasoning, (), places))
    if delta.reasoning_content and not twice:
        places = ((*at, "reasoning_content"),)
        parts.append(Part(index, "reasoning_content", delta.reasoning_content, (), places))
    if delta.content:
        parts.append(Part(index, "content", delta.content, (), ((*at, "content"),)))
    if delta.refusal:
        parts.append(Part(index, "refusal", delta.refusal, (), ((*at, "refusal"),)))
    for position, call in enumerate(delta.tool_calls or ()):
        parts += _read_call(index, (*at, "tool_calls", position), call)


def _read_call(index: int, at: Place, call: _ToolCall) -> Iterator[Part]:
    ids = () if call.id is None else (call.id,)
    function = call.function
    if function is None:
        return
    if function.name:
        header: tuple[Place, ...] = ((*at, "id"), (*at, "type"), (*at, "function", "name"))
        kind = f"tool_call {call.index} {call.type} {function.name}"
        yield Part(index, kind, None, ids, header)
    if function.arguments:
        place = (*at, "function", "arguments")
        yield Part(index, f"arguments {call.index}", function.arguments, ids, (place,))


def _logprob_tokens(logprobs: dict[str, Any]) -> list[Any]:
    """Return the tokens of logprobs in the shape of completions or of chat."""
    if isinstance(tokens := logprobs.get("tokens"), list):
        return tokens
    entries = logprobs.get("content")
    if not isinstance(entries, list):
        return []
    return [entry.get("token") if isinstance(entry, dict) else entry for entry in entries]


def _take_unknown(document: Any) -> Iterator[Part]:
    """Remove members that no struct names from a chunk, and yield those with a value as atoms."""
    yield from _take(document, _Chunk, STREAM, ())
    choices = document.get("choices") if isinstance(document, dict) else None
    for position, choice in enumerate(choices if isinstance(choices, list) else ()):
        if not isinstance(choice, dict):
            continue
        index, at = choice.get("index", 0), ("choices", position)
        yield from _take(choice, _Choice, index, at)
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            continue
        yield from _take(delta, _Delta, index, (*at, "delta"))
        calls = delta.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            place = (*at, "delta", "tool_calls", number)
            yield from _take(call, _ToolCall, index, place)
            if isinstance(call, dict):
                yield from _take(call.get("function"), _Function, index, (*place, "function"))


def _take(document: Any, shape: type[_Strict], channel: Channel, at: Place) -> Iterator[Part]:
    if not isinstance(document, dict):
        return
    for name in document.keys() - set(shape.__struct_fields__):
        value = document.pop(name)
        if value is not None:
            # An error ends the stream.
            yield make_atom(channel, name, value, (*at, name), ends=name == "error")
