"""Reads the parts of a stream's events, by endpoint. Pure.

A chunk of chat or completions is an event with choices. An event of `/v1/messages` or
`/v1/responses` names its type; a stream has one answer there, whose parts follow each other. Its
text comes in delta events of one member each, and all other events are atoms.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from app.continuation.parts import (
    DONE,
    STREAM,
    Channel,
    Part,
    Place,
    list_tokens,
    make_atom,
)

# The only channel of an endpoint with one answer per stream.
_ANSWER = 0


class _Strict(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Decoding fails for other events and for members not named here: they are read as atoms."""


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
    weight_versions: list[Any] | None = None  # since vLLM 0.33


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
    kv_transfer_params: dict[str, Any] | None = None  # since vLLM 0.33


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
    # The first two are in the first chunk only, the last in that which finishes.
    parts += [
        make_atom(STREAM, name, value, (name,))
        for name in ("prompt_token_ids", "prompt_text", "kv_transfer_params")
        if (value := getattr(chunk, name)) is not None
    ]
    for position, choice in enumerate(chunk.choices):
        parts += [part for part in unknown if part.channel == choice.index]
        parts += _read_choice(position, choice)
    if not chunk.choices and chunk.usage is not None:
        parts.append(Part(STREAM, "usage"))
    return parts


def _read_choice(position: int, choice: _Choice) -> list[Part]:
    index, at = choice.index, ("choices", position)
    parts = [
        make_atom(index, name, value, (*at, name))
        for name in ("prompt_token_ids", "weight_versions")
        if (value := getattr(choice, name)) is not None
    ]
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
    for name in ("reasoning", "reasoning_content", "content", "refusal"):
        text: str | None = getattr(delta, name)
        if not text or (twice and name == "reasoning_content"):
            continue
        places: tuple[Place, ...] = ((*at, name),)
        if twice and name == "reasoning":
            places += ((*at, "reasoning_content"),)
        parts.append(Part(index, name, text, (), places))
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
    return _tokens_of(entries)


def _tokens_of(entries: list[Any]) -> list[Any]:
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


class _Text(_Strict, tag="text_delta"):
    text: str


class _Thinking(_Strict, tag="thinking_delta"):
    thinking: str


class _Input(_Strict, tag="input_json_delta"):
    partial_json: str


class _BlockDelta(_Strict):
    type: Literal["content_block_delta"]
    index: int
    delta: _Text | _Thinking | _Input


class _ResponseDelta(_Strict):
    """A delta of any of the types of text of a response."""

    type: str
    delta: str
    sequence_number: int | None = None
    output_index: int = 0
    content_index: int = 0
    summary_index: int = 0
    item_id: str | None = None
    logprobs: list[Any] | None = None
    obfuscation: str | None = None


_block_delta = msgspec.json.Decoder(_BlockDelta)
_response_delta = msgspec.json.Decoder(_ResponseDelta)

_MESSAGE_ENDS = frozenset({"message_stop", "error"})
_RESPONSE_ENDS = frozenset(
    {"response.completed", "response.failed", "response.incomplete", "error"}
)


def read_message_event(data: bytes) -> list[Part]:
    """Return the parts of an event of `/v1/messages`: at most one.

    Raises one of `UNREADABLE` if it is no such event.
    """
    try:
        event = _block_delta.decode(data)
    except msgspec.ValidationError:
        return _read_other(data, _MESSAGE_ENDS)
    delta = event.delta
    if isinstance(delta, _Text):
        name, text = "text", delta.text
    elif isinstance(delta, _Thinking):
        name, text = "thinking", delta.thinking
    else:
        name, text = "partial_json", delta.partial_json
    if not text:
        return []
    return [Part(_ANSWER, f"{name} {event.index}", text, (), (("delta", name),))]


def read_response_event(data: bytes) -> list[Part]:
    """Return the parts of an event of `/v1/responses`: its text or atom, and tokens of logprobs.

    Raises one of `UNREADABLE` if it is no such event.
    """
    try:
        event = _response_delta.decode(data)
    except msgspec.ValidationError:
        return _read_other(data, _RESPONSE_ENDS)
    parts = []
    if event.delta:
        place: Place = ("delta",)
        of = f"{event.type} {event.output_index} {event.content_index} {event.summary_index}"
        ids = () if event.item_id is None else (event.item_id,)
        parts.append(Part(_ANSWER, of, event.delta, ids, (place,)))
    if event.logprobs:
        parts.append(list_tokens(_ANSWER, "logprobs", _tokens_of(event.logprobs)))
    return parts


def _read_other(data: bytes, ends: frozenset[str]) -> list[Part]:
    document = msgspec.json.decode(data, type=dict[str, Any])
    name = str(document.get("type"))
    if name == "ping":
        return []
    return [make_atom(_ANSWER, name, document, ends=name in ends)]


@dataclass(frozen=True, slots=True)
class Dialect:
    """Reads the events of one endpoint's stream, and says how they are renamed."""

    read: Callable[[bytes], list[Part]]
    # Members at the top of every event that belong to the run, not to the answer.
    run_members: tuple[str, ...] = ()
    # The events are numbered, and contain the time of creation in a response object.
    numbered: bool = False

    def read_parts(self, data: bytes) -> list[Part]:
        """Return the parts of an event's data.

        Raises one of `UNREADABLE` if the data is not of this dialect.
        """
        return [DONE] if data == b"[DONE]" else self.read(data)


_CHOICES = Dialect(read_chunk, run_members=("id", "created"))
DIALECTS = {
    "/v1/chat/completions": _CHOICES,
    "/v1/completions": _CHOICES,
    "/v1/messages": Dialect(read_message_event),
    "/v1/responses": Dialect(read_response_event, numbered=True),
}
