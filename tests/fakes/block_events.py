"""Streams of `/v1/messages` and `/v1/responses` in vLLM 0.32's events. Pure.

Ids of items, tool calls and signatures are random, as vLLM's are.
"""

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.chat_parser import ChatParser
from tests.fakes.completion_events import Reply
from tests.fakes.generation import Generation


def named_event(kind: str, value: dict[str, Any]) -> bytes:
    """Return an event with its name."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return f"event: {kind}\ndata: {text}\n\n".encode()


def _random(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:16]}"


def _parts(delta: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the parts of a delta in the order in which they were written."""
    for name in ("reasoning", "content"):
        if delta.get(name):
            yield name, delta[name]
    for call in delta.get("tool_calls", ()):
        yield ("call", call) if "id" in call else ("arguments", call["function"]["arguments"])


@dataclass
class _Messages:
    """The blocks of a message (vllm/entrypoints/anthropic/serving.py)."""

    index: int = -1
    open: str | None = None

    def part(self, kind: str, value: Any) -> Iterator[bytes]:
        block = "call" if kind == "arguments" else kind
        if self.open != block or kind == "call":
            yield from self.close()
            yield self._start(block, value)
        match kind:
            case "reasoning":
                yield self._delta({"type": "thinking_delta", "thinking": value})
            case "content":
                yield self._delta({"type": "text_delta", "text": value})
            case "arguments":
                yield self._delta({"type": "input_json_delta", "partial_json": value})

    def close(self) -> Iterator[bytes]:
        if self.open is None:
            return
        if self.open == "reasoning":
            yield self._delta({"type": "signature_delta", "signature": uuid.uuid4().hex})
        yield self._event("content_block_stop")
        self.open = None

    def _start(self, block: str, value: Any) -> bytes:
        self.index, self.open = self.index + 1, block
        match block:
            case "reasoning":
                content: dict[str, Any] = {"type": "thinking", "thinking": ""}
            case "content":
                content = {"type": "text", "text": ""}
            case _:
                name = value["function"]["name"]
                content = {"type": "tool_use", "id": value["id"], "name": name, "input": {}}
        return self._event("content_block_start", content_block=content)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", delta=delta)

    def _event(self, kind: str, **more: Any) -> bytes:
        return named_event(kind, {"type": kind, **more, "index": self.index})


def message_events(reply: Reply, made: Generation) -> Iterator[tuple[bytes, int]]:
    """Return the events of a streamed message, and how many tokens each brings."""
    message: dict[str, Any] = {
        "id": reply.id,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": reply.model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": len(made.prompt), "output_tokens": 0},
    }
    yield named_event("message_start", {"type": "message_start", "message": message}), 0
    parser, blocks, finish, count = ChatParser(made.prompt, reply.parses), _Messages(), "stop", 0
    for output in made.outputs(reply.widths):
        events = b""
        for kind, value in _parts(parser.parse(output) or {}):
            events += b"".join(blocks.part(kind, value))
        finish, count = output.finish or finish, count + len(output.tokens)
        yield events, len(output.tokens)
    for event in blocks.close():
        yield event, 0
    delta = {"stop_reason": _stop_reason(finish, parser), "stop_sequence": None}
    usage = {"input_tokens": len(made.prompt), "output_tokens": count}
    yield (
        named_event("message_delta", {"type": "message_delta", "delta": delta, "usage": usage}),
        0,
    )
    yield named_event("message_stop", {"type": "message_stop"}), 0


def message_answer(reply: Reply, made: Generation) -> bytes:
    """Return a whole message; what a tool call takes has to be JSON."""
    parser, finish, count = ChatParser(made.prompt, reply.parses), "stop", 0
    content: list[dict[str, Any]] = []
    for output in made.outputs((made.tokens + 1,)):
        finish, count = output.finish or finish, count + len(output.tokens)
        for kind, value in _parts(parser.parse(output) or {}):
            match kind:
                case "reasoning":
                    signed = {"thinking": value, "signature": uuid.uuid4().hex}
                    content.append({"type": "thinking", **signed})
                case "content":
                    content.append({"type": "text", "text": value})
                case "call":
                    name = value["function"]["name"]
                    content.append({"type": "tool_use", "id": value["id"], "name": name})
                case _:
                    content[-1]["input"] = json.loads(value)
    message = {
        "id": reply.id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": reply.model,
        "stop_reason": _stop_reason(finish, parser),
        "stop_sequence": None,
        "usage": {"input_tokens": len(made.prompt), "output_tokens": count},
    }
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()


def _stop_reason(finish: str, parser: ChatParser) -> str:
    return "max_tokens" if finish == "length" else "tool_use" if parser.calls else "end_turn"


@dataclass
class _Responses:
    """The items of a response (vllm/entrypoints/openai/responses)."""

    # Its events so far, and its items that are whole.
    number: int = 0
    items: list[dict[str, Any]] = field(default_factory=list)
    open: str | None = None
    _item: dict[str, Any] = field(default_factory=dict)
    _text: str = ""

    def event(self, kind: str, **more: Any) -> bytes:
        """Return an event; its members are in the order of their names, as vLLM mostly has them."""
        value = {**more, "sequence_number": self.number, "type": kind}
        self.number += 1
        return named_event(kind, value)

    def part(self, kind: str, value: Any) -> Iterator[bytes]:
        block = "call" if kind == "arguments" else kind
        if self.open != block or kind == "call":
            yield from self.close()
            yield from self._start(block, value)
        if kind == "call":
            return
        self._text += value
        at: dict[str, Any] = {"delta": value, "item_id": self._item["id"]}
        if kind == "arguments":
            yield self.event("response.function_call_arguments.delta", **at, **self._at())
            return
        at = {"content_index": 0, **at} | ({"logprobs": []} if kind == "content" else {})
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        yield self.event(f"response.{name}.delta", **at, **self._at())

    def close(self) -> Iterator[bytes]:
        if self.open is None:
            return
        item, text, where = self._item, self._text, {"item_id": self._item["id"]}
        match self.open:
            case "call":
                item["arguments"] = text
                told = {"arguments": text, **where, **self._at(), "name": item["name"]}
                yield self.event("response.function_call_arguments.done", **told)
            case "reasoning":
                part: dict[str, Any] = {"text": text, "type": "reasoning_text"}
                item["content"] = [part]
                yield from self._done("reasoning_text", part, where)
            case _:
                part = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
                item["content"] = [part]
                yield from self._done("output_text", part, where)
        item["status"] = "completed"
        yield self.event("response.output_item.done", item=item, **self._at())
        self.items.append(item)
        self.open = None

    def _done(self, name: str, part: dict[str, Any], where: dict[str, Any]) -> Iterator[bytes]:
        at = {"content_index": 0, **where, **self._at()}
        yield self.event(f"response.{name}.done", **at, text=part["text"])
        yield self.event("response.content_part.done", **at, part=part)

    def _start(self, block: str, value: Any) -> Iterator[bytes]:
        self.open, self._text = block, ""
        item: dict[str, Any]
        match block:
            case "call":
                name, call = value["function"]["name"], value["id"]
                item = {"arguments": "", "call_id": call, "name": name, "type": "function_call"}
                item |= {"id": _random("fc"), "async": None, "caller": None, "namespace": None}
            case "reasoning":
                item = {"id": _random("rs"), "summary": [], "type": "reasoning", "content": None}
                item["encrypted_content"] = None
            case _:
                item = {"id": _random("msg"), "content": [], "role": "assistant"}
        item["status"] = "in_progress"
        if block == "content":
            item |= {"type": "message", "phase": None}
        self._item = item
        yield self.event("response.output_item.added", item=item, **self._at())
        if block != "call":
            part: dict[str, Any] = {"text": "", "type": "reasoning_text"}
            if block == "content":
                part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
            at = {"content_index": 0, "item_id": item["id"], **self._at()}
            yield self.event("response.content_part.added", **at, part=part)

    def _at(self) -> dict[str, int]:
        return {"output_index": len(self.items)}


def response_events(
    reply: Reply, made: Generation, body: dict[str, Any]
) -> Iterator[tuple[bytes, int]]:
    """Return the events of a streamed response, and how many tokens each brings."""
    items = _Responses()
    whole: dict[str, Any] = {
        "id": reply.id,
        "created_at": reply.created,
        "incomplete_details": None,
        "model": reply.model,
        "object": "response",
        "output": [],
        "temperature": body.get("temperature"),
        "max_output_tokens": body.get("max_output_tokens"),
        "status": "in_progress",
        "usage": None,
    }
    yield items.event("response.created", response=whole), 0
    yield items.event("response.in_progress", response=whole), 0
    parser, finish, count = ChatParser(made.prompt, reply.parses), "stop", 0
    for output in made.outputs(reply.widths):
        events = b""
        for kind, value in _parts(parser.parse(output) or {}):
            events += b"".join(items.part(kind, value))
        finish, count = output.finish or finish, count + len(output.tokens)
        yield events, len(output.tokens)
    for event in items.close():
        yield event, 0
    cut = finish == "length"
    whole |= {"output": items.items, "status": "incomplete" if cut else "completed"}
    whole["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    whole["usage"] = {
        "input_tokens": len(made.prompt),
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": count,
        "output_tokens_details": {"reasoning_tokens": parser.reasoning_tokens * made.reasons},
        "total_tokens": len(made.prompt) + count,
    }
    yield items.event("response.completed", response=whole), 0
