"""The requests of the continuation run: kinds of stream, each with a few requests of its kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engines.demo.dialogues import DIALOGUES, STORY, WEATHER_TOOL

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
# Tokens of a sampled answer, which ends at them and never before.
SAMPLED_TOKENS = 120
# Of answers that end by themselves: above what any of them has.
ENOUGH = 400

_BY_NAME = {dialogue.name: dialogue for dialogue in DIALOGUES}


@dataclass(frozen=True, slots=True)
class Request:
    """A path and a body, without the model."""

    path: str
    body: Json


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests whose streams must survive in the same way.

    `tokens`: the answer is sampled and differs every time; it has exactly so many tokens.
    """

    name: str
    requests: Sequence[Request]
    tokens: int | None = None


def _chat(name: str, **more: Any) -> Request:
    dialogue = _BY_NAME[name]
    body: Json = {
        "messages": list(dialogue.messages),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if dialogue.tools:
        body["tools"] = list(dialogue.tools)
    return Request(CHAT, body | more)


def _complete(prompt: str, **more: Any) -> Request:
    body = {
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": ENOUGH,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Request(COMPLETIONS, body | more)


def _message(name: str, **more: Any) -> Request:
    body = {
        "messages": list(_BY_NAME[name].messages),
        "temperature": 0,
        "max_tokens": ENOUGH,
        "stream": True,
    }
    return Request(MESSAGES, body | more)


def _response(name: str, **more: Any) -> Request:
    body = {"input": _BY_NAME[name].question, "temperature": 0, "stream": True}
    return Request(RESPONSES, body | more)


def _turn(text: str, *, answer: str = "") -> str:
    """Return a question in the model's chat template, as a bare prompt."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n{answer}"


def _schema(schema: Json) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


_STORY_ASKED = _BY_NAME["story"].question
_CAPITAL = {
    "type": "object",
    "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}
# Most of the text is given by the schema, so that the answer is long and the same every time.
_LONG = {
    "type": "object",
    "properties": {
        f"property_number_{number}": {"enum": ["one value of this property"]}
        for number in range(1, 9)
    },
    "required": [f"property_number_{number}" for number in range(1, 9)],
    "additionalProperties": False,
}
_LONG_ANSWER = {"json": _LONG, "disable_any_whitespace": True}
_NAMED = {"type": "function", "function": {"name": WEATHER_TOOL["function"]["name"]}}
_EMOJI = {"choice": ["😀🎉🚀🌊🏮🐢🌕⛵🎈🧭" * 2]}
_SAMPLED: Json = {"temperature": 1, "ignore_eos": True, "max_tokens": SAMPLED_TOKENS}

KINDS: tuple[Kind, ...] = (
    Kind(
        "plain chat",
        (
            _chat("story"),
            _chat("story", max_tokens=90),
            _chat("python"),
            _chat("name"),
            _chat("vllm", min_tokens=5, max_tokens=ENOUGH),
        ),
    ),
    Kind("reasoning", (_chat("factorial"), _chat("strawberry"), _chat("larger"), _chat("train"))),
    Kind(
        "completions",
        (
            _complete(_turn(_STORY_ASKED)),
            _complete(_turn(_STORY_ASKED, answer=STORY[:200])),
            _complete(_turn(_BY_NAME["vllm"].question), max_tokens=20),
        ),
    ),
    Kind(
        "Chinese",
        (_chat("poem-zh"), _chat("hello-zh"), _chat("river-zh"), _chat("heads-zh")),
    ),
    Kind(
        "emoji",
        (
            _chat("hello", structured_outputs=_EMOJI),
            _complete(_turn("Hello!"), structured_outputs=_EMOJI),
        ),
    ),
    Kind("tool call begun", (_chat("weather-call"),)),
    Kind(
        "tool call forced",
        (_chat("weather-call", tool_choice=_NAMED), _chat("weather-call", tool_choice="required")),
    ),
    Kind(
        "JSON schema",
        (
            _chat("json", response_format=_schema(_CAPITAL)),
            _chat("json", structured_outputs=_LONG_ANSWER, max_tokens=ENOUGH),
        ),
    ),
    Kind(
        "stop string",
        (
            _chat("story", stop=["never dark"]),
            _chat("story", stop=["unheard of", "until morning"], include_stop_str_in_output=True),
        ),
    ),
    Kind("penalties", (_chat("story", frequency_penalty=0.1, max_tokens=150),)),
    Kind("n = 2, seeded", (_chat("story", n=2, temperature=0.5, seed=7),)),
    Kind("/v1/messages", (_message("story"), _message("python"), _message("factorial"))),
    Kind("/v1/responses", (_response("story"), _response("python"), _response("factorial"))),
    Kind("sampled, seeded", (_chat("story", temperature=0.5, seed=11),)),
    Kind("sampled", (_chat("story", **_SAMPLED),), SAMPLED_TOKENS),
    Kind("sampled, with ids", (_chat("story", **_SAMPLED, return_token_ids=True),), SAMPLED_TOKENS),
)
