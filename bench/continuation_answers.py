"""Assembles a streamed answer from its events, and compares it with the undisturbed one. Pure.

An answer is a text per place: a channel of a choice, or an event of the typed streams of
/v1/messages and /v1/responses. Texts are joined, so that it does not matter how the engine cut them
into events. IDs and times are not compared with another answer, but must stay the same within one.
"""

import enum
import json
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

SHOWN = 60
# Differ from answer to answer.
VOLATILE = frozenset(
    {"id", "item_id", "call_id", "created", "created_at", "completed_at", "sequence_number",
     "signature"}
)  # fmt: skip
# Members of a chunk that all chunks of an answer share.
SHARED = ("id", "created", "model", "object")
LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete")


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

    texts: dict[str, str] = field(default_factory=dict)
    usages: list[Json] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ends: int = 0
    token_ids: int = 0
    faults: list[str] = field(default_factory=list)
    _constants: dict[str, object] = field(default_factory=dict)
    _sequence: int = 0  # the next sequence_number

    @property
    def usage(self) -> tuple[int, int] | None:
        """Return the tokens of prompt and completion that were last reported to the client."""
        for usage in reversed(self.usages):
            prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
            completion = usage.get("completion_tokens", usage.get("output_tokens"))
            if prompt is not None and completion is not None:
                return int(prompt), int(completion)
        return None

    def add(self, place: str, value: object) -> None:
        """Add to the text of a place."""
        if value:
            text = value if isinstance(value, str) else _canonical(value)
            self.texts[place] = self.texts.get(place, "") + text

    def hold(self, name: str, value: object) -> None:
        """Note a value that must be the same in the whole answer."""
        if value is not None and self._constants.setdefault(name, value) != value:
            self.faults.append(f"{name} changed within the answer")

    def count(self, number: int | None) -> None:
        """Note an event's sequence_number."""
        if number is not None:
            if number != self._sequence:
                self.faults.append(f"sequence_number {number}, not {self._sequence}")
            self._sequence = number + 1


def assemble(events: list[bytes]) -> Answer:
    """Return the answer of a stream's events, each without the empty line that ends it."""
    answer = Answer()
    for event in events:
        data = b"\n".join(
            line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")
        )
        if not data:
            continue  # a comment
        shown = data[:SHOWN].decode(errors="replace")
        if data == b"[DONE]":
            # vLLM sends it after an error of its own, and after a typed stream's last event.
            answer.ends += 1
        elif answer.ends or answer.errors:
            answer.faults.append(f"after the end: {shown}")
        else:
            try:
                _add_json(answer, json.loads(data))
            except (ValueError, AttributeError):
                answer.faults.append(f"unknown event: {shown}")
    return answer


def _add_json(answer: Answer, event: Json) -> None:
    if event.get("error") is not None or event.get("type") == "error":
        error = event.get("error") or event
        answer.errors.append(str(error.get("code") or error.get("type")))
    elif "type" in event:
        _add_typed(answer, event)
    elif "choices" in event:
        _add_chunk(answer, event)
    else:
        raise ValueError


def _add_chunk(answer: Answer, chunk: Json) -> None:
    for name in SHARED:
        answer.hold(name, chunk.get(name))
    if chunk.get("usage") is not None:
        answer.usages.append(chunk["usage"])
    for choice in chunk["choices"]:
        place = f"choice {choice['index']}"
        answer.token_ids += len(choice.get("token_ids") or ())
        for call in (delta := choice.get("delta") or {}).pop("tool_calls", None) or ():
            _add_call(answer, f"{place} tool {call.get('index')}", call)
        for channel, value in delta.items():
            answer.add(f"{place} {channel}", value)
        for channel in ("text", "finish_reason", "stop_reason"):
            answer.add(f"{place} {channel}", choice.get(channel))


def _add_call(answer: Answer, place: str, call: Json) -> None:
    if call.get("id") is not None:
        answer.hold(f"{place} id", call["id"])
        answer.add(f"{place} id", ".")  # twice is one too many
    function = call.get("function") or {}
    for channel in ("name", "arguments"):
        answer.add(f"{place} {channel}", function.get(channel))


def _add_typed(answer: Answer, event: Json) -> None:
    """Add an event of /v1/messages or /v1/responses."""
    kind = str(event["type"])
    if kind == "ping":
        return
    whole: Json = event.get("response") or event.get("message") or {}
    answer.hold("id", whole.get("id"))
    if "item_id" in event:
        answer.hold(f"item {event.get('output_index')}", event["item_id"])
    answer.count(event.get("sequence_number"))
    for holder in (event, whole):
        if (usage := holder.pop("usage", None)) is not None:
            answer.usages.append(usage)
    place = f"{kind} {event.get('output_index', event.get('index'))}"
    delta = event.get("delta")
    if kind.endswith("delta") and isinstance(delta, str):
        answer.add(place, delta)
    elif kind.endswith("delta") and isinstance(delta, dict):
        for name, value in _stable(delta).items():
            if name != "type":
                answer.add(f"{place} {name}", value)
    else:
        answer.add(place, _stable(event))
    if kind in LAST_EVENTS:
        answer.ends += 1
    elif kind == "response.failed":
        answer.errors.append(str((whole.get("error") or {}).get("code")))


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
    if answer.faults:
        return Verdict(Outcome.WRONG, answer.faults[0])
    if answer.errors:
        if answer.ends > 1:
            return Verdict(Outcome.WRONG, f"{answer.ends} ends after the error")
        code = answer.errors[0]
        words = "" if tokens else _difference(answer.texts, expected.texts, partial=True)
        if words:
            return Verdict(Outcome.WRONG, f"before the error {code}: {words}")
        return Verdict(Outcome.ERROR, code)
    if bool(answer.token_ids) != bool(expected.token_ids):
        return Verdict(Outcome.WRONG, "token_ids that were not asked for, or none")
    usage = expected.usage
    texts, wanted_texts = answer.texts, expected.texts
    if tokens is not None:
        usage = (usage or (0, 0))[0], tokens
        if answer.token_ids not in (0, tokens):
            return Verdict(Outcome.WRONG, f"{answer.token_ids} token ids, not {tokens}")
        texts, wanted_texts = _ends_of(texts), _ends_of(wanted_texts)
    # vLLM's count of reasoning tokens depends on how chunks are cut: not compared.
    found = answer.ends, len(answer.usages), answer.usage
    wanted = expected.ends, len(expected.usages), usage
    words = _difference(texts, wanted_texts)
    if not words and found != wanted:
        words = f"ends, usages and usage {found}, not {wanted}"
    return Verdict(Outcome.WRONG, words) if words else Verdict(Outcome.EQUAL)


def _ends_of(texts: dict[str, str]) -> dict[str, str]:
    return {place: text for place, text in texts.items() if place.endswith("finish_reason")}


def _difference(texts: dict[str, str], expected: dict[str, str], *, partial: bool = False) -> str:
    """Describe the first difference of two answers; an empty text if there is none.

    `partial`: the beginning of each text is enough.
    """
    places = texts.keys() if partial else texts.keys() | expected.keys()
    for place in sorted(places):
        text, wanted = texts.get(place, ""), expected.get(place, "")
        if text != wanted and not (partial and wanted.startswith(text)):
            pairs = zip(text, wanted, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(wanted)))
            shown, due = text[at : at + SHOWN], wanted[at : at + SHOWN]
            return f"{place}, character {at}: {shown!r}, not {due!r}"
    return ""
