"""Chat completions and completions in vLLM 0.32's bytes, plain and streamed. Pure.

Members and their order are those of vllm/entrypoints/openai/*completion/serving.py.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.chat_parser import ChatParser
from tests.fakes.generation import Generation, Output

FINGERPRINT = "vllm-0.32.0-tp1-fake"
CREATED = 1795227950
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Reply:
    """What the events of one answer have in common, and what its request asked for."""

    model: str
    id: str = "chatcmpl-fake"
    created: int = CREATED
    usage: bool = False
    continuous_usage: bool = False
    # The request's `return_token_ids`.
    ids: bool = False
    # The engine runs with a reasoning or a tool parser.
    parses: bool = True
    # The request names the function that is to be called.
    names_tool: bool = False
    # The steps that arrive together, in turn.
    widths: Sequence[int] = field(default=(1,))

    def event(self, choices: list[dict[str, Any]], kind: str, **more: Any) -> bytes:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return data(head | {"choices": choices} | more)


def data(value: dict[str, Any]) -> bytes:
    """Return one event."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return b"data: " + text.encode() + b"\n\n"


def request_options(path: str, body: dict[str, Any], *, knows_ids: bool) -> dict[str, Any]:
    """Return the fields of `Reply` that a request decides."""
    options = body.get("stream_options") or {}
    usage = bool(options.get("include_usage"))
    return {
        "usage": usage,
        "continuous_usage": usage and bool(options.get("continuous_usage_stats")),
        "ids": bool(body.get("return_token_ids")) and knows_ids,
        "names_tool": isinstance(body.get("tool_choice"), dict),
    }


def chat_events(reply: Reply, made: Generation) -> Iterator[tuple[bytes, int]]:
    """Return the events of a streamed chat completion, and how many tokens each brings."""
    kind = "chat.completion.chunk"
    parsers = [ChatParser(made.prompt, reply.parses) for _ in made.choices]
    counts = [0] * len(parsers)

    def usage(of: Sequence[int]) -> dict[str, Any]:
        return _usage(len(made.prompt), [counts[n] for n in of], [parsers[n] for n in of], made)

    prompt = {"prompt_token_ids": made.prompt if reply.ids else None, "prompt_text": None}
    for n in range(len(parsers)):
        choice = _chat_choice(n, {"role": "assistant", "content": ""})
        told = {"usage": usage([n])} if reply.continuous_usage else {}
        yield reply.event([choice], kind, **told, **prompt), 0
    for output in made.outputs(reply.widths):
        n = output.index
        counts[n] += len(output.tokens)
        delta = parsers[n].parse(output)
        if delta is None and not output.finish and not reply.ids:
            yield b"", len(output.tokens)
            continue
        choice = _chat_choice(n, delta or {}, _finish(reply, parsers[n], output))
        choice["token_ids"] = output.tokens if reply.ids else None
        more: dict[str, Any] = {"usage": usage([n])} if reply.continuous_usage else {}
        if output.finish and not reply.usage:
            more["system_fingerprint"] = FINGERPRINT
        yield reply.event([choice], kind, **more), len(output.tokens)
    if reply.usage:
        told = usage(range(len(parsers)))
        yield reply.event([], kind, usage=told, system_fingerprint=FINGERPRINT), 0
    yield DONE, 0


def completion_events(reply: Reply, made: Generation) -> Iterator[tuple[bytes, int]]:
    """Return the events of a streamed completion, and how many tokens each brings."""
    kind = "text_completion"
    counts = [0] * len(made.choices)
    for output in made.outputs(reply.widths):
        n = output.index
        first = not counts[n]
        counts[n] += len(output.tokens)
        choice = {"index": n, "text": output.text, "logprobs": None, "finish_reason": output.finish}
        choice["stop_reason"] = None
        choice["prompt_token_ids"] = made.prompt if reply.ids and first else None
        choice["token_ids"] = output.tokens if reply.ids else None
        more: dict[str, Any] = {}
        if reply.continuous_usage:
            more["usage"] = _usage(len(made.prompt), [counts[n]])
        if output.finish and not reply.usage:
            more["system_fingerprint"] = FINGERPRINT
        yield reply.event([choice], kind, **more), len(output.tokens)
    if reply.usage:
        told = _usage(len(made.prompt), counts)
        yield reply.event([], kind, usage=told, system_fingerprint=FINGERPRINT), 0
    yield DONE, 0


def chat_answer(reply: Reply, made: Generation) -> bytes:
    """Return a whole chat completion."""
    parsers = [ChatParser(made.prompt, reply.parses) for _ in made.choices]
    choices = []
    for output in made.outputs((made.tokens + 1,)):
        parser = parsers[output.index]
        delta = parser.parse(output) or {}
        message = {
            "role": "assistant",
            "content": delta.get("content"),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if calls := delta.get("tool_calls"):
            message["tool_calls"] = _whole_calls(calls)
        message["reasoning"] = delta.get("reasoning")
        choice = {"index": output.index, "message": message, "logprobs": None}
        choice |= {"finish_reason": _finish(reply, parser, output), "stop_reason": None}
        choice["token_ids"] = output.tokens if reply.ids else None
        choices.append(choice | {"routed_experts": None})
    counts = [len(tokens) for tokens, _ in made.choices]
    usage = _usage(len(made.prompt), counts, parsers, made)
    prompt = made.prompt if reply.ids else None
    ending = {"prompt_logprobs": None, "prompt_token_ids": prompt, "prompt_text": None}
    return _answer(reply, "chat.completion", choices, usage, **ending)


def batch_answer(reply: Reply, made: Sequence[Generation]) -> bytes:
    """Return the response to a batch of conversations: a choice for each."""
    answers = [json.loads(chat_answer(reply, one)) for one in made]
    choices = [{**one["choices"][0], "index": at} for at, one in enumerate(answers)]
    names = ("prompt_tokens", "total_tokens", "completion_tokens")
    usage = {name: sum(one["usage"][name] for one in answers) for name in names}
    return json.dumps({**answers[0], "choices": choices, "usage": usage}).encode()


def completion_answer(reply: Reply, made: Generation) -> bytes:
    """Return a whole completion."""
    choices = []
    for output in made.outputs((made.tokens + 1,)):
        choice = {"index": output.index, "text": output.text, "logprobs": None}
        choice |= {"finish_reason": output.finish, "stop_reason": None}
        choice["token_ids"] = output.tokens if reply.ids else None
        choice["prompt_logprobs"] = None
        choice["prompt_token_ids"] = made.prompt if reply.ids else None
        choices.append(choice | {"routed_experts": None})
    usage = _usage(len(made.prompt), [len(tokens) for tokens, _ in made.choices])
    return _answer(reply, "text_completion", choices, usage)


def _answer(
    reply: Reply, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any], **ending: Any
) -> bytes:
    value = {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}
    value |= {"choices": choices, "service_tier": None, "system_fingerprint": FINGERPRINT}
    value |= {"usage": usage, **ending}
    value |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _whole_calls(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if "id" in piece:
            name = piece["function"]["name"]
            function = {"name": name, "arguments": ""}
            calls.append({"id": piece["id"], "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return calls


def _chat_choice(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return choice | {"stop_reason": None} if finish else choice


def _finish(reply: Reply, parser: ChatParser, output: Output) -> str | None:
    called = parser.calls and not reply.names_tool and output.finish == "stop"
    return "tool_calls" if called else output.finish


def _usage(
    prompt: int,
    counts: Sequence[int],
    parsers: Sequence[ChatParser] = (),
    made: Generation | None = None,
) -> dict[str, Any]:
    tokens = sum(counts)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + tokens,
        "completion_tokens": tokens,
    }
    if made is not None and made.reasons:
        counted = sum(parser.reasoning_tokens for parser in parsers)
        usage["completion_tokens_details"] = {"reasoning_tokens": counted}
    return usage
