"""What of a request's body is changed on its way to the engine: usage asked for, bounds kept. Pure.

Only what must change: a stream is made to tell its usage, and numbers that an operator bounded are
lowered to the bound. What is not understood stays as it is; the engine has the words to refuse it.
"""

from collections.abc import Mapping

import msgspec

from app.routing.catalogue import Bounds

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# Where each endpoint says how many tokens it wants; the first one is set where none is given.
# Completions have a default of their own, 16, which null takes away; messages must give a number.
OUTPUT_FIELDS: dict[str, tuple[str, ...]] = {
    CHAT: ("max_tokens", "max_completion_tokens"),
    COMPLETIONS: ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
_PROMPTS = ("prompt", "prompt_embeds")
_ABSENT = (b"", b"null")
_SET_IF: dict[str, tuple[bytes, ...]] = {
    CHAT: _ABSENT,
    COMPLETIONS: (b"null",),
    "/v1/responses": _ABSENT,
}
_PLAIN = {b"": None, b"null": None, b"true": True, b"false": False}
# What else is true and false for pydantic, with which vLLM reads; words in any case.
_TRUE = frozenset({1, "1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({0, "0", "off", "f", "false", "n", "no"})
_text = msgspec.json.Decoder(str)
_answer = msgspec.json.Decoder(str | float)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])

Members = Mapping[str, msgspec.Raw]


class Rewrite(msgspec.Struct, frozen=True):
    """What becomes of one request."""

    changes: Mapping[str, object] = {}
    # The usage chunk was asked for by the gateway alone, so the client does not get it.
    withhold_usage: bool = False
    one_choice: bool = True


NOTHING = Rewrite()


def rewrite(endpoint: str, members: Members, bounds: Bounds) -> Rewrite:
    """Return what to change in the members of a JSON body."""
    fields = OUTPUT_FIELDS.get(endpoint)
    if fields is None:
        return NOTHING
    changes: dict[str, object] = {}
    withhold = False
    one_choice = True
    if endpoint in (CHAT, COMPLETIONS):
        # A list of prompts has an answer each; so has a list of tokens one, which does no harm.
        one_choice = not any(_value(members, name).startswith(b"[") for name in _PROMPTS)
        if "n" in members:
            n = _value(members, "n")
            one_choice = one_choice and n in (b"null", b"1")
            if bounds.choices is not None and _is_over(n, bounds.choices):
                changes["n"] = bounds.choices
        if is_stream(members):
            options = _with_usage(_value(members, "stream_options"))
            if options is not None:
                changes["stream_options"] = options
                withhold = True
    if bounds.output_tokens is not None:
        _bound_output(endpoint, fields, members, bounds.output_tokens, changes)
    return Rewrite(changes, withhold, one_choice) if changes or not one_choice else NOTHING


def is_stream(members: Members) -> bool:
    """Whether a request asks for its answer as a stream."""
    return _truth(_value(members, "stream")) is True


def _bound_output(
    endpoint: str,
    fields: tuple[str, ...],
    members: Members,
    bound: int,
    changes: dict[str, object],
) -> None:
    values = [_value(members, name) for name in fields]
    for name, value in zip(fields, values, strict=True):
        if _is_over(value, bound):
            changes[name] = bound
    unbounded = _SET_IF.get(endpoint, ())
    if all(value in unbounded for value in values):
        changes[fields[0]] = bound


def _value(members: Members, name: str) -> bytes:
    raw = members.get(name)
    return b"" if raw is None else bytes(raw)


def _with_usage(options: bytes) -> dict[str, object] | None:
    """Return stream options that ask for usage, or None where the client did, or is not understood.

    `continuous_usage_stats` has no effect without `include_usage`, and would have one now.
    """
    if options in _ABSENT:
        return {"include_usage": True}
    try:
        members = _object.decode(options)
    except msgspec.DecodeError:
        return None
    asked = _value(members, "include_usage")
    if asked not in _ABSENT and _truth(asked) is not False:
        return None
    kept = {name: raw for name, raw in members.items() if name != "continuous_usage_stats"}
    return {**kept, "include_usage": True}


def _truth(value: bytes) -> bool | None:
    """Return what a JSON value says to a yes-or-no question of vLLM's; None where it refuses it."""
    if value in _PLAIN:
        return _PLAIN[value]
    try:
        said = _answer.decode(value)
    except msgspec.DecodeError:
        return None
    if isinstance(said, str):
        said = said.lower()
    return True if said in _TRUE else False if said in _FALSE else None


def _is_over(value: bytes, bound: int) -> bool:
    """Whether a JSON value counts more than `bound` for vLLM, which reads 8, 8.0 and "8" alike."""
    try:
        text = _text.decode(value) if value[:1] == b'"' else value.decode()
        return float(text) > bound
    except (ValueError, msgspec.DecodeError):
        return False
