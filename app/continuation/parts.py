"""Parts of a stream's events that a client puts together to an answer. Pure.

Two runs of a request give the same parts, in other chunks and with other IDs. A part is either
text, which may be split anywhere between two characters, or an atom, which is equal or not: a
role, a tool call's header, a finish reason, an event without text. Every part belongs to a channel,
within which order counts: a choice, or the whole stream where a dialect has one answer only.
"""

from hashlib import blake2b
from typing import Any

import msgspec

Channel = int | tuple[int, str]
# Keys and positions from the top of an event's JSON to a value.
Place = tuple[str | int, ...]

# The channel of what belongs to no choice: the usage chunk and the end of the stream.
STREAM: Channel = -1

# Errors of reading an event.
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)

_IDS = frozenset({"id", "item_id", "call_id"})
# Members that differ between two runs of one request. Logprobs are compared by their tokens, since
# their values may differ in the last digit; a signature of vLLM (0.32) is a random number.
_VOLATILE = _IDS | {
    "completed_at",
    "created",
    "created_at",
    "logprobs",
    "metrics",
    "obfuscation",
    "sequence_number",
    "signature",
    "system_fingerprint",
    "usage",
}


class Part(msgspec.Struct, frozen=True, gc=False):
    """One part of an event.

    `kind` of a text tells which member it belongs to; of an atom it contains its value as well.
    """

    channel: Channel
    kind: str
    text: str | None = None  # None: an atom
    ids: tuple[str, ...] = ()  # that belong to this part, and differ between runs
    places: tuple[Place, ...] = ()  # of its members, for cutting
    ends: bool = False  # nothing but [DONE] follows it
    listed: bool = False  # per token, beside the text: cannot be cut

    @property
    def name(self) -> str:
        """Return its kind without values, for logs."""
        return self.kind.partition(" ")[0]


DONE = Part(STREAM, "[DONE]", ends=True)


def make_atom(
    channel: Channel, name: str, value: Any, place: Place = (), *, ends: bool = False
) -> Part:
    """Return an atom of a JSON value; equal for equal values without their volatile members.

    Raises `RecursionError` for a value that is nested too deeply.
    """
    ids: list[str] = []
    stable = msgspec.json.encode(_without_volatile(value, ids), order="sorted")
    digest = blake2b(stable, digest_size=16).hexdigest()
    return Part(channel, f"{name} {digest}", None, tuple(ids), (place,) if place else (), ends)


def list_tokens(index: int, name: str, tokens: list[Any]) -> Part:
    """Return what a choice lists per token, such as token IDs, for comparison across chunks."""
    text = b"".join(msgspec.json.encode(token) + b"," for token in tokens).decode()
    return Part((index, name), name, text, listed=True)


def _without_volatile(value: Any, ids: list[str]) -> Any:
    """Return a copy of a JSON value without volatile members, and collect its IDs in order."""
    if isinstance(value, dict):
        ids += [value[key] for key in sorted(_IDS & value.keys()) if isinstance(value[key], str)]
        return {
            key: _without_volatile(member, ids)
            for key, member in sorted(value.items())
            if key not in _VOLATILE
        }
    if isinstance(value, list):
        return [_without_volatile(member, ids) for member in value]
    return value
