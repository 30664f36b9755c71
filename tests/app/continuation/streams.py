"""Recorded streams of vLLM, what a client makes of one, and second runs of the same request."""

import json
import re
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

Json = Any

_RECORDED = Path(__file__).parent / "recorded"
# Lists per token cannot be split again; their tests are of their own.
_LISTED = {"chat_logprobs", "chat_token_ids", "completions_logprobs"}
ENDPOINTS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
NAMES = sorted({path.stem for path in _RECORDED.glob("*.sse")} - _LISTED)
_ID_NAMES = ("id", "item_id", "call_id")


def recorded(name: str) -> list[bytes]:
    """Return the events of a recorded stream, as vLLM 0.32 wrote them."""
    return split((_RECORDED / f"{name}.sse").read_bytes())


def as_by_vllm_0_33(event: bytes) -> bytes:
    """Return a chunk with the members that it has from vLLM 0.33 on: read, not recorded."""
    if not isinstance(data := data_of(event), dict) or not data.get("choices"):
        return event
    for choice in data["choices"]:
        if "token_ids" in choice:
            choice["weight_versions"] = None
            data["kv_transfer_params"] = None
    return event_of(data)


def endpoint_of(name: str) -> str:
    return ENDPOINTS[name.partition("_")[0]]


def split(stream: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]


def data_of(event: bytes) -> Json:
    """Return an event's JSON, or its text where it is none, such as [DONE]."""
    data = event.partition(b"data: ")[2].strip()
    return json.loads(data) if data.startswith(b"{") else data.decode()


def event_of(data: Json) -> bytes:
    """Return an event as vLLM writes it."""
    if not isinstance(data, dict):
        return f"data: {data}\n\n".encode()
    line = f"data: {json.dumps(data, separators=(',', ':'), ensure_ascii=False)}\n\n"
    return ((f"event: {data['type']}\n" if "type" in data else "") + line).encode()


# What a client puts together


def assemble(endpoint: str, stream: bytes) -> Json:
    """Return the answer that a client puts together, without what belongs to the run.

    IDs become their order of appearance, so that those of one item must be equal everywhere.
    """
    events = [data_of(event) for event in split(stream) if not event.startswith(b":")]
    if endpoint in ("/v1/chat/completions", "/v1/completions"):
        return _assemble_choices(events)
    if endpoint == "/v1/messages":
        return _assemble_blocks(events)
    return _assemble_response(events)


def _assemble_choices(events: list[Json]) -> Json:
    chunks = [event for event in events if isinstance(event, dict)]
    assert len({chunk["id"] for chunk in chunks}) <= 1
    assert len({chunk["created"] for chunk in chunks}) <= 1
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            answer = choices.setdefault(choice["index"], {"text": "", "calls": {}, "roles": 0})
            answer["text"] += choice.get("text") or ""
            delta = choice.get("delta") or {}
            answer["roles"] += "role" in delta
            for name in ("content", "reasoning"):
                answer[name] = answer.get(name, "") + (delta.get(name) or "")
            for call in delta.get("tool_calls") or ():
                _add_call(answer["calls"], call)
            if choice["finish_reason"] is not None:
                assert "finish" not in answer
                answer["finish"] = choice["finish_reason"], choice["stop_reason"]
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return choices, usage, [event for event in events if isinstance(event, str)]


def _add_call(calls: dict[int, Json], delta: Json) -> None:
    call = calls.setdefault(delta["index"], {"names": [], "ids": 0, "arguments": ""})
    call["ids"] += "id" in delta
    function = delta.get("function") or {}
    call["names"] += [function["name"]] if function.get("name") else []
    call["arguments"] += function.get("arguments") or ""


def _assemble_blocks(events: list[Json]) -> Json:
    blocks: dict[int, Json] = {}
    order = []
    for event in events:
        kind = event["type"]
        if kind == "content_block_start":
            block = event["content_block"]
            assert event["index"] not in blocks
            blocks[event["index"]] = [block["type"], block.get("name"), "", 0]
        elif kind == "content_block_delta":
            delta = dict(event["delta"])
            signed = delta.pop("type") == "signature_delta"
            blocks[event["index"]][2] += "" if signed else delta.popitem()[1]
            blocks[event["index"]][3] += signed
            continue
        order.append((kind, event.get("delta"), (event.get("usage") or {}).get("output_tokens")))
    return blocks, order


def _assemble_response(events: list[Json]) -> Json:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    known: dict[str, int] = {}
    texts: dict[Json, str] = {}
    rest = []
    for event in events:
        stable = _stable(event, known)
        if event["type"].endswith(".delta"):
            delta = stable.pop("delta")
            key = json.dumps(stable, sort_keys=True)
            texts[key] = texts.get(key, "") + delta
        else:
            rest.append(stable)
    created = [event["response"]["created_at"] for event in events if "response" in event]
    assert len(set(created)) <= 1
    return texts, rest


def _stable(value: Json, known: dict[str, int]) -> Json:
    if isinstance(value, list):
        return [_stable(each, known) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: known.setdefault(member, len(known)) if name in _ID_NAMES else _stable(member, known)
        for name, member in value.items()
        if name not in ("sequence_number", "created_at")
    }


# Second runs


def second_run(endpoint: str, events: list[bytes], random: Random) -> bytes:
    """Return the same answer as another run writes it: other chunks, order, IDs and times."""
    lanes: dict[int, list[Json]] = {}
    tail = []
    for event in events:
        data = data_of(event)
        if isinstance(data, str) or not data.get("choices", True):
            tail.append(data)
        else:
            lanes.setdefault((data.get("choices") or [{}])[0].get("index", 0), []).append(data)
    queues = [_rechunk(lane, random) for lane in lanes.values()]
    mixed = []
    while queues := [queue for queue in queues if queue]:
        mixed.append(random.choice(queues).pop(0))
    number = iter(range(10**6))
    for data in mixed:
        if "sequence_number" in data:
            data["sequence_number"] = next(number)
    return _rename(b"".join(map(event_of, mixed + tail)))


def _rechunk(lane: list[Json], random: Random) -> list[Json]:
    """Join neighboring text of one kind and split it anywhere; maybe join it with what follows."""
    out: list[Json] = []
    for path, group in groupby(lane, text_path):
        members = list(group)
        if path is None:
            out += members
            continue
        text = "".join(text_at(data, path) for data in members)
        cuts = sorted(random.sample(range(1, len(text)), random.randrange(min(len(text), 8))))
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            copy = json.loads(json.dumps(members[0]))
            set_text(copy, path, text[start:end])
            out.append(copy)
    return [data for data in _join(out, random) if data is not None]


def _join(lane: list[Json], random: Random) -> list[Json | None]:
    """Put some neighboring deltas of chat into one chunk, as vLLM does for a slow reader."""
    joined: list[Json | None] = [*lane]
    for at in range(1, len(lane) - 1):
        before, after = joined[at], lane[at + 1]
        if before is None or "choices" not in before or "delta" not in before["choices"][0]:
            continue
        first, second = before["choices"][0], after["choices"][0]
        order = ["reasoning", "content", "tool_calls"]
        firsts = [order.index(name) for name in order if first["delta"].get(name)]
        seconds = [order.index(name) for name in order if second["delta"].get(name)]
        ordered = not seconds or (bool(firsts) and max(firsts) < min(seconds))
        if ordered and first["finish_reason"] is None and random.random() < 0.5:
            given = {name: value for name, value in first["delta"].items() if value}
            joined[at] = None
            second["delta"] = {**second["delta"], **given}
    return joined


def text_path(data: Json) -> tuple[str | int, ...] | None:
    """Return where an event has its text, if it has one text only."""
    if isinstance(data.get("delta"), str):
        return ("delta",)
    if isinstance(data.get("delta"), dict):
        name = next((n for n in ("text", "thinking", "partial_json") if data["delta"].get(n)), None)
        return ("delta", name) if name else None
    if not data.get("choices") or data["choices"][0]["finish_reason"] is not None:
        return None
    choice = data["choices"][0]
    if choice.get("text"):
        return ("choices", 0, "text")
    delta = choice.get("delta") or {}
    filled = [name for name, value in delta.items() if value]
    if filled == ["tool_calls"] and (delta["tool_calls"][0]["function"]).get("arguments"):
        return ("choices", 0, "delta", "tool_calls", 0, "function", "arguments")
    if len(filled) != 1 or filled[0] not in ("content", "reasoning"):
        return None
    return ("choices", 0, "delta", filled[0])


def text_at(data: Json, path: tuple[str | int, ...]) -> str:
    for key in path:
        data = data[key]
    return str(data)


def set_text(data: Json, path: tuple[str | int, ...], text: str) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = text


def _rename(stream: bytes) -> bytes:
    """Give a stream the IDs and times of another run."""
    ids = set(re.findall(rb'"(?:id|item_id|call_id)":"([^"]+)"', stream))
    for each in sorted(ids, key=len, reverse=True):
        stream = stream.replace(b'"%b"' % each, b'"other-%b"' % each[::-1])
    stream = re.sub(rb'"(created|created_at)":\d+', rb'"\1":1999999999', stream)
    return re.sub(rb'"signature":"[^"]+"', b'"signature":"another"', stream)
