"""Reads the parts of an event that names its type, as in `/v1/messages` and `/v1/responses`. Pure.

Both dialects have one answer per stream, whose parts follow each other. Their text comes in delta
events of one member each; all other events are atoms.
"""

from typing import Any, Literal

import msgspec

from app.continuation.parts import Part, Place, list_tokens, make_atom

# The only channel of these dialects.
_ANSWER = 0


class _Strict(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Decoding fails for other events and other members: they are read as atoms."""


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
        tokens = [each.get("token") if isinstance(each, dict) else each for each in event.logprobs]
        parts.append(list_tokens(_ANSWER, "logprobs", tokens))
    return parts


def _read_other(data: bytes, ends: frozenset[str]) -> list[Part]:
    document = msgspec.json.decode(data, type=dict[str, Any])
    name = str(document.get("type"))
    if name == "ping":
        return []
    return [make_atom(_ANSWER, name, document, ends=name in ends)]
