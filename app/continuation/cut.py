"""Cuts from an event what its client has already. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from app.continuation.parts import Part, Place


def cut_event(data: bytes, parts: Sequence[Part], rests: Sequence[str | None]) -> bytes:
    """Return an event's data with only the new part of its answer.

    `rests`: per part the text that is new, "" if the client has all of it, or None if it has none.
    """
    document = msgspec.json.decode(data)
    for part, rest in zip(parts, rests, strict=True):
        for place in part.places if rest is not None else ():
            _replace(document, place, rest or "")
    choices = document.get("choices")
    if isinstance(choices, list):
        new = {part.channel for part, rest in zip(parts, rests, strict=True) if rest != ""}
        document["choices"] = [choice for choice in choices if choice.get("index", 0) in new]
        for choice in document["choices"]:
            _drop_empty_calls(choice.get("delta") or {})
    return msgspec.json.encode(document)


def _replace(document: Any, place: Place, rest: str) -> None:
    """Set a text to its new part; remove a member that is not new, except a completion's text."""
    for key in place[:-1]:
        document = document.get(key) if isinstance(document, dict) else document[key]
        if document is None:
            return
    name = place[-1]
    if rest or name == "text":
        document[name] = rest
    else:
        document.pop(name, None)


def _drop_empty_calls(delta: dict[str, Any]) -> None:
    calls = delta.get("tool_calls")
    if not isinstance(calls, list):
        return
    delta["tool_calls"] = [call for call in calls if _has_content(call)]
    if not delta["tool_calls"]:
        del delta["tool_calls"]


def _has_content(call: dict[str, Any]) -> bool:
    return bool(call.get("function")) or call.keys() - {"index", "function"} != set()
