"""Assembles a streamed answer from its events, and compares it with the undisturbed one. Pure.

An answer consists of parts (choices, or the whole response of the typed streams of /v1/messages and
/v1/responses), a part of steps: pieces of text of one channel, joined, so that it does not matter
how the engine cut the text into events. IDs and times are not compared with another answer, but
must stay the same within one.
"""

import enum
import json
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
# A channel and its text, or the type of an event and its content.
Step = tuple[str, str]

SHOWN = 60
# Differ from answer to answer.
VOLATILE = frozenset(
    {
        "id",
        "item_id",
        "call_id",
        "created",
        "created_at",
        "completed_at",
        "sequence_number",
        "signature",
    }
)
# Members of a chunk that all chunks of an answer share.
SHARED = ("id", "created", "model", "object")
THOUGHT = ("role", "reasoning", "reasoning_content")
_TEXT_OF = ("text", "thinking", "partial_json", "signature")


class Outcome(enum.StrEnum):
    """What became of a stream."""

    EQUAL = "equal"
    ERROR = "error event"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome, and the code of the error or what is wrong."""

    outcome: Outcome
    words: str = ""


@dataclass(slots=True)
class Answer:
    """What a client has got of a stream."""

    parts: dict[str, list[Step]] = field(default_factory=dict)
    usages: list[Json] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ends: int = 0
    token_ids: int = 0
    # Values that must not change within an answer, by their name.
    constants: dict[str, set[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    sequence: int = 0  # the next sequence_number

    @property
    def usage(self) -> tuple[int, int] | None:
        """Return the tokens of prompt and completion that were last reported to the client."""
        for usage in reversed(self.usages):
            prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
            completion = usage.get("completion_tokens", usage.get("output_tokens"))
            if prompt is not None and completion is not None:
                return int(prompt), int(completion)
        return None

    @property
    def thinking(self) -> bool:
        """True if it ends within a thought."""
        return any(steps[-1][0] in THOUGHT[1:] for steps in self.parts.values())

    def add(self, part: str, channel: str, text: str, *, joined: bool = True) -> None:
        """Add text to a part: to its last step if that has the same channel."""
        steps = self.parts.setdefault(part, [])
        if joined and steps and steps[-1][0] == channel:
            steps[-1] = (channel, steps[-1][1] + text)
        else:
            steps.append((channel, text))

    def hold(self, name: str, value: object) -> None:
        """Note a value that must be the same in the whole answer."""
        if value is not None:
            self.constants.setdefault(name, set()).add(str(value))


def assemble(events: list[bytes]) -> Answer:
    """Return the answer of a stream's events, each without the empty line that ends it."""
    answer = Answer()
    for event in events:
        data = b"\n".join(
            line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")
        )
        if not data:
            continue  # a comment
        if answer.ends or answer.errors:
            _add_trailing(answer, data)
        elif data == b"[DONE]":
            answer.ends += 1
        else:
            _add_json(answer, data)
    return answer


def _add_trailing(answer: Answer, data: bytes) -> None:
    """Add an event after the end: `[DONE]` may follow an error, and a typed stream's last event.

    vLLM sends it after an error of its own.
    """
    if data == b"[DONE]" and answer.errors and not answer.ends:
        answer.ends += 1
    elif data == b"[DONE]" and answer.ends == 1 and "response" in answer.parts:
        answer.add("response", "[DONE]", "")
        answer.ends += 1
    else:
        answer.faults.append(f"after the end: {data[:SHOWN].decode(errors='replace')}")


def _add_json(answer: Answer, data: bytes) -> None:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        answer.faults.append(f"not JSON: {data[:SHOWN].decode(errors='replace')}")
    elif event.get("error") is not None or event.get("type") == "error":
        error = event.get("error") or event
        answer.errors.append(str(error.get("code") or error.get("type")))
    elif "type" in event:
        _add_typed(answer, event)
    elif "choices" in event:
        _add_chunk(answer, event)
    else:
        answer.faults.append(f"unknown event: {data[:SHOWN].decode(errors='replace')}")


def _add_chunk(answer: Answer, chunk: Json) -> None:
    for name in SHARED:
        answer.hold(name, chunk.get(name))
    if chunk.get("usage") is not None:
        answer.usages.append(chunk["usage"])
    _count_prompt_ids(answer, chunk)
    for choice in chunk["choices"]:
        part = f"choice {choice['index']}"
        _count_prompt_ids(answer, choice)
        answer.token_ids += len(choice.get("token_ids") or ())
        if "text" in choice:
            _add_text(answer, part, "text", choice["text"])
        delta = choice.get("delta") or {}
        for channel, value in sorted(delta.items(), key=_thought_first):
            if channel == "tool_calls":
                _add_calls(answer, part, value or [])
            else:
                _add_text(answer, part, channel, value)
        for channel in ("finish_reason", "stop_reason"):
            if choice.get(channel) is not None:
                answer.add(part, channel, str(choice[channel]))


def _thought_first(member: tuple[str, object]) -> bool:
    """Sort the thought first: where both are in one chunk, it came before the answer."""
    return member[0] not in THOUGHT


def _count_prompt_ids(answer: Answer, where: Json) -> None:
    if where.get("prompt_token_ids"):
        answer.add("prompt", "ids", f"{len(where['prompt_token_ids'])} ")


def _add_text(answer: Answer, part: str, channel: str, value: object) -> None:
    if value:
        answer.add(part, channel, value if isinstance(value, str) else _canonical(value))


def _add_calls(answer: Answer, part: str, calls: list[Json]) -> None:
    for call in calls:
        function = call.get("function") or {}
        place = f"tool {call.get('index')}"
        if call.get("id") is not None:
            answer.hold(f"{part} {place} id", call["id"])
            answer.add(part, f"{place} id", ".")  # twice is one too many
        _add_text(answer, part, f"{place} name", function.get("name"))
        _add_text(answer, part, f"{place} arguments", function.get("arguments"))


def _add_typed(answer: Answer, event: Json) -> None:
    """Add an event of /v1/messages or /v1/responses."""
    kind = str(event["type"])
    whole = event.get("response") or event.get("message") or {}
    if isinstance(whole, dict):
        answer.hold("id", whole.get("id"))
    for usage in (event.get("usage"), whole.get("usage") if isinstance(whole, dict) else None):
        if usage is not None:
            answer.usages.append(usage)
    if "item_id" in event:
        answer.hold(f"item {event.get('output_index')}", event["item_id"])
    if "sequence_number" in event:
        _check_sequence(answer, int(event["sequence_number"]))
    if kind == "ping":
        return
    if kind.endswith("delta") and (text := _delta_text(event)) is not None:
        place = event.get("output_index", event.get("index"))
        answer.add("response", f"{kind} {place} {text[0]}", text[1])
        return
    event.pop("usage", None)
    if isinstance(whole, dict):
        whole.pop("usage", None)
    answer.add("response", kind, _canonical(_stable(event)), joined=False)
    if kind in ("message_stop", "response.completed", "response.incomplete"):
        answer.ends += 1
    elif kind == "response.failed":
        answer.errors.append(str((whole.get("error") or {}).get("code")))


def _delta_text(event: Json) -> tuple[str, str] | None:
    """Return the channel and text of a delta, or None if it carries no text."""
    delta = event.get("delta")
    if isinstance(delta, str):
        return "", delta
    if isinstance(delta, dict):
        for name in _TEXT_OF:
            if name in delta:
                # A signature is random.
                return name, "" if name == "signature" else str(delta[name])
    return None


def _check_sequence(answer: Answer, number: int) -> None:
    if number != answer.sequence:
        answer.faults.append(f"sequence_number {number}, not {answer.sequence}")
    answer.sequence = number + 1


def _stable(value: Any) -> Any:
    """Return a value without what differs from answer to answer."""
    if isinstance(value, dict):
        return {name: _stable(one) for name, one in value.items() if name not in VOLATILE}
    return [_stable(one) for one in value] if isinstance(value, list) else value


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def judge(answer: Answer, expected: Answer, tokens: int | None = None) -> Verdict:
    """Return what became of a stream whose undisturbed answer is `expected`.

    With `tokens` the text is sampled: only its number of tokens, usage and end are compared.
    """
    changed = [name for name, values in answer.constants.items() if len(values) > 1]
    if changed:
        return Verdict(Outcome.WRONG, f"changed within the answer: {', '.join(changed)}")
    if answer.faults:
        return Verdict(Outcome.WRONG, answer.faults[0])
    if answer.errors:
        return _judge_error(answer, expected, tokens)
    if answer.ends != expected.ends:
        return Verdict(Outcome.WRONG, f"{answer.ends} ends")
    if bool(answer.token_ids) != bool(expected.token_ids):
        return Verdict(Outcome.WRONG, "token_ids that were not asked for, or none")
    if tokens is None:
        words = difference(answer.parts, expected.parts) or _usage_difference(answer, expected)
    else:
        words = _count_difference(answer, expected, tokens)
    return Verdict(Outcome.WRONG, words) if words else Verdict(Outcome.EQUAL)


def _judge_error(answer: Answer, expected: Answer, tokens: int | None) -> Verdict:
    """Return the verdict on an answer that ended by an error: what came before must be right."""
    code = answer.errors[0]
    if tokens is None:
        for part, steps in answer.parts.items():
            if not _is_prefix(steps, expected.parts.get(part, [])):
                words = _first_difference(part, steps, expected.parts.get(part, []))
                return Verdict(Outcome.WRONG, f"before the error {code}: {words}")
    return Verdict(Outcome.ERROR, code)


def _is_prefix(steps: list[Step], whole: list[Step]) -> bool:
    if not steps:
        return True
    *most, (channel, text) = steps
    last = len(most)
    if last >= len(whole) or most != whole[:last]:
        return False
    return whole[last][0] == channel and whole[last][1].startswith(text)


def difference(parts: dict[str, list[Step]], expected: dict[str, list[Step]]) -> str:
    """Describe the first difference of two answers; an empty text if there is none."""
    if parts.keys() != expected.keys():
        return f"parts {sorted(parts)}, not {sorted(expected)}"
    for part, steps in parts.items():
        if steps != expected[part]:
            return _first_difference(part, steps, expected[part])
    return ""


def _first_difference(part: str, steps: list[Step], expected: list[Step]) -> str:
    for number, (channel, text) in enumerate(steps):
        if number >= len(expected):
            return f"{part}: more than expected: {channel} {text[:SHOWN]!r}"
        wanted_channel, wanted = expected[number]
        if channel != wanted_channel:
            return f"{part}: {channel} {text[:SHOWN]!r} in place of {wanted_channel}"
        if text != wanted:
            pairs = zip(text, wanted, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(wanted)))
            shown, due = text[at : at + SHOWN], wanted[at : at + SHOWN]
            return f"{part}: {channel}, character {at}: {shown!r}, not {due!r}"
    return f"{part}: ends before {expected[len(steps)][0]}"


def _usage_difference(answer: Answer, expected: Answer) -> str:
    """Compare number and sums: vLLM's count of reasoning tokens depends on how chunks are cut."""
    found, wanted = ((len(one.usages), one.usage) for one in (answer, expected))
    return "" if found == wanted else f"usages {found}, not {wanted}"


def _count_difference(answer: Answer, expected: Answer, tokens: int) -> str:
    if len(answer.usages) != len(expected.usages):
        return f"{len(answer.usages)} usages"
    wanted = (expected.usage or (0, 0))[0], tokens
    if answer.usage != wanted:
        return f"usage {answer.usage}, not {wanted}"
    if answer.token_ids and answer.token_ids != tokens:
        return f"{answer.token_ids} token ids, not {tokens}"
    ends = [step for steps in answer.parts.values() for step in steps if step[0] == "finish_reason"]
    return "" if ends == [("finish_reason", "length")] else f"finish_reason {ends}"
