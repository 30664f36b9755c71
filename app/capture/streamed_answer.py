"""Puts the events of a stream together to the answer that a plain response would have been. Pure.

In OpenAI's dialect the deltas of each choice are merged: texts are joined, and the members of lists
with an `index`, such as tool calls, are merged by it. A response of `/v1/responses` is in its last
event, a message of `/v1/messages` begins in its first one.
"""

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from app.sse import read_data, split_events

# Members that are repeated rather than continued.
_WHOLE = frozenset({"id", "type", "name", "role", "object", "model", "index", "finish_reason"})
# One per token, beside the text that they repeat.
_LEFT_OUT = frozenset({"logprobs", "token_ids", "prompt_token_ids", "obfuscation"})
_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
# Events after which other threads get the interpreter, for a moment.
_PAUSE_EVERY = 64
_PAUSE_S = 0.0005
MAX_OTHER = 100

Json = dict[str, Any]


def join_events(raw: bytes) -> Json:
    """Return the answer that the events of a stream make."""
    answer: Json = {}
    for number, event in enumerate(_events(raw), 1):
        _add(answer, event)
        if number % _PAUSE_EVERY == 0:
            time.sleep(_PAUSE_S)
    _finish(answer)
    return answer


def _events(raw: bytes) -> Iterator[Json]:
    for event in split_events(raw):
        data = read_data(event)
        if not data or data == b"[DONE]":
            continue
        try:
            found = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            continue  # the last one, which was cut
        if isinstance(found, dict):
            yield found


def _add(answer: Json, event: Json) -> None:
    kind = str(event.get("type", ""))
    if isinstance(event.get("response"), dict):
        answer.update(event["response"])
        if answer.get("output"):
            answer.pop("deltas", None)
    elif kind == "message_start" and isinstance(event.get("message"), dict):
        answer.update(event["message"])
    elif kind == "message_delta":
        answer.update(event.get("delta") or {})
        answer["usage"] = {**(answer.get("usage") or {}), **(event.get("usage") or {})}
    elif kind.startswith("content_block_"):
        _add_block(answer, event)
    elif kind.endswith(".delta") and isinstance(event.get("delta"), str):
        place = f"{kind} {event.get('output_index', 0)} {event.get('content_index', 0)}"
        _append(answer.setdefault("deltas", {}), place, event["delta"])
    elif isinstance(event.get("choices"), list):
        _add_chunk(answer, event)
    elif "error" in event:
        answer["error"] = event["error"]
    elif "." not in kind and kind not in ("ping", "message_stop"):
        others = answer.setdefault("events", [])
        if len(others) < MAX_OTHER:
            others.append(event)


def _add_chunk(answer: Json, chunk: Json) -> None:
    for name, value in chunk.items():
        if name != "choices" and value is not None and name not in _LEFT_OUT:
            answer[name] = value
    for choice in chunk["choices"]:
        if not isinstance(choice, dict):
            continue
        whole = _at_index(answer.setdefault("choices", []), choice.get("index", 0))
        delta = choice.get("delta")
        if isinstance(delta, dict):
            _merge(whole.setdefault("message", {}), delta)
        _merge(whole, {name: value for name, value in choice.items() if name != "delta"})


def _merge(whole: Json, delta: Json) -> None:
    """Add a delta to what there is of an object."""
    for name, value in delta.items():
        if value is None or name in _LEFT_OUT:
            continue
        before = whole.get(name)
        if isinstance(value, str) and name not in _WHOLE:
            _append(whole, name, value)
        elif isinstance(value, dict) and isinstance(before, dict | None):
            _merge(whole.setdefault(name, {}), value)
        elif isinstance(value, list):
            _merge_list(whole.setdefault(name, []), value)
        else:
            whole[name] = value


def _merge_list(whole: Any, items: list[Any]) -> None:
    if not isinstance(whole, list):
        return
    for item in items:
        if isinstance(item, dict) and isinstance(item.get("index"), int):
            _merge(_at_index(whole, item["index"]), item)
        else:
            whole.append(item)


def _append(whole: Json, name: str, text: str) -> None:
    """Add to a text, which is a list of pieces until `_finish`."""
    before = whole.get(name)
    if isinstance(before, _Pieces):
        before.append(text)
    else:
        whole[name] = _Pieces([text] if before is None else [str(before), text])


def _at_index(items: list[Any], index: Any) -> Json:
    for item in items:
        if isinstance(item, dict) and item.get("index") == index:
            return item
    new: Json = {"index": index}
    items.append(new)
    return new


def _add_block(answer: Json, event: Json) -> None:
    """Add an event of a content block of a message."""
    blocks = answer.setdefault("content", [])
    if not isinstance(blocks, list):
        return
    block = _at_index(blocks, event.get("index", 0))
    started, delta = event.get("content_block"), event.get("delta")
    if isinstance(started, dict):
        block.update(started)
    if isinstance(delta, dict) and (name := _DELTAS.get(str(delta.get("type")))) is not None:
        _append(block, name, str(delta.get(name, "")))


class _Pieces(list[str]):
    """The pieces of a text: joining them at every event would take a time that is quadratic."""


def _finish(value: Any) -> Any:
    """Join the pieces of all texts, in place."""
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, dict):
        for name, member in value.items():
            value[name] = _finish(member)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            value[place] = _finish(item)
    return value
