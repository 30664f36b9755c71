"""vLLM's sampling parameters as command-line flags: a table, and the parser of their values.

Importing vLLM takes ten seconds and more, too long for `--help` and a typing error. So the table is
kept here, for vLLM 0.32; a test compares it with the installed `SamplingParams` and
`StructuredOutputsParams`: names, types, defaults and bounds.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

# What a command line gives for a parameter.
Value = str | bool | float | list[str]


class Kind(Enum):
    """The type of a flag's value; the enum's value is its name in help."""

    INTEGER = "INTEGER"
    NUMBER = "NUMBER"
    TEXT = "TEXT"
    ON = ""  # --x, without a value: vLLM's default is off
    OFF = " "  # --no-x, without a value: vLLM's default is on
    JSON = "JSON"
    INTEGERS = "INTEGERS"  # comma-separated and repeatable
    TEXTS = "TEXT…"  # repeatable
    BIASES = "TOKEN=BIAS"  # repeatable


@dataclass(frozen=True, slots=True)
class Parameter:
    """A sampling parameter: its name, its type, its help, and the bounds of its value.

    The bounds name a wrong value before vLLM is imported; vLLM checks whatever else it refuses.
    `member` is its name in StructuredOutputsParams, which is one field of SamplingParams.
    """

    name: str
    kind: Kind
    help: str
    low: float | None = None
    high: float | None = None
    member: str | None = None

    @property
    def flag(self) -> str:
        return ("--no-" if self.kind is Kind.OFF else "--") + self.name.replace("_", "-")


class SamplingError(ValueError):
    """An invalid value; the text has the flag, the value and what is allowed."""


SAMPLING: tuple[Parameter, ...] = (
    Parameter("n", Kind.INTEGER, "Answers to each prompt.", 1),
    Parameter("temperature", Kind.NUMBER, "0 (greedy) to 2; higher is more random.", 0, 2),
    Parameter(
        "top_p", Kind.NUMBER, "Choose among the likeliest tokens of this total, in (0, 1].", 0, 1
    ),
    Parameter("top_k", Kind.INTEGER, "Choose among so many likeliest tokens; 0: among all.", -1),
    Parameter(
        "min_p",
        Kind.NUMBER,
        "Least probability, relative to the likeliest token's, in [0, 1].",
        0,
        1,
    ),
    Parameter("presence_penalty", Kind.NUMBER, "-2 to 2; above 0 favours new tokens.", -2, 2),
    Parameter(
        "frequency_penalty", Kind.NUMBER, "-2 to 2; above 0 disfavours frequent tokens.", -2, 2
    ),
    Parameter(
        "repetition_penalty",
        Kind.NUMBER,
        "Above 1 disfavours tokens of the prompt and of the answer so far.",
        0,
    ),
    Parameter("seed", Kind.INTEGER, "Makes random sampling repeatable."),
    Parameter(
        "max_tokens",
        Kind.INTEGER,
        "Longest answer, in tokens. Default: the model's, else what the context leaves.",
        1,
    ),
    Parameter("min_tokens", Kind.INTEGER, "Tokens before the answer may end.", 0),
    Parameter("stop", Kind.TEXTS, "Text that ends the answer."),
    Parameter("stop_token_ids", Kind.INTEGERS, "Token that ends the answer."),
    Parameter("include_stop_str_in_output", Kind.ON, "Keep the stop text in the answer."),
    Parameter("ignore_eos", Kind.ON, "Go on after the end-of-sequence token."),
    Parameter("bad_words", Kind.TEXTS, "Word that must not be generated."),
    Parameter("allowed_token_ids", Kind.INTEGERS, "Token that may be generated, no other."),
    Parameter("logit_bias", Kind.BIASES, "Add to a token's logit, -100 to 100."),
    Parameter("logprobs", Kind.INTEGER, "Likeliest tokens to show per token; -1: all.", -1),
    Parameter("prompt_logprobs", Kind.INTEGER, "The same for the prompt.", -1),
    Parameter("logprob_token_ids", Kind.INTEGERS, "Token whose probability is shown."),
    Parameter("skip_special_tokens", Kind.OFF, "Keep special tokens in the text."),
    Parameter("spaces_between_special_tokens", Kind.OFF, "Put no spaces between special tokens."),
    Parameter("thinking_token_budget", Kind.INTEGER, "Most tokens of reasoning; -1: no bound.", -1),
    Parameter(
        "repetition_detection",
        Kind.JSON,
        "End an answer that repeats itself: max_pattern_size, min_pattern_size, min_count.",
    ),
    Parameter("skip_reading_prefix_cache", Kind.ON, "Compute the whole prompt anew."),
    Parameter("watermarking", Kind.OFF, "Leave the engine's watermark out."),
    Parameter("extra_args", Kind.JSON, "Object for custom samplers and plug-ins."),
    Parameter("json_schema", Kind.JSON, "JSON Schema that the answer must satisfy.", member="json"),
    Parameter("json_object", Kind.ON, "The answer must be a JSON object.", member="json_object"),
    Parameter("regex", Kind.TEXT, "Regular expression that the answer must match.", member="regex"),
    Parameter("choice", Kind.TEXTS, "Text that the answer may be, no other.", member="choice"),
    Parameter(
        "grammar", Kind.TEXT, "Grammar (EBNF) that the answer must follow.", member="grammar"
    ),
    Parameter(
        "structural_tag", Kind.TEXT, "xgrammar's structural tag, as JSON.", member="structural_tag"
    ),
    Parameter(
        "disable_any_whitespace",
        Kind.ON,
        "JSON without free whitespace.",
        member="disable_any_whitespace",
    ),
    Parameter(
        "disable_additional_properties",
        Kind.ON,
        "JSON of the schema's keys only.",
        member="disable_additional_properties",
    ),
    Parameter(
        "whitespace_pattern",
        Kind.TEXT,
        "Whitespace that JSON may hold.",
        member="whitespace_pattern",
    ),
)

# Fields of SamplingParams without a flag, and the reason.
LEFT_OUT: Mapping[str, str] = {
    "structured_outputs": "its members are flags",
    "detokenize": "the command shows text",
    "output_kind": "how outputs reach the caller of the library",
    "stream_interval": "how outputs reach the caller of the library",
    "flat_logprobs": "a representation in Python",
    "skip_clone": "internal to vLLM",
    "output_text_buffer_length": "internal to vLLM",
    "prompt_logprob_token_ids": "for scoring, which gives no text",
    "prompt_logprob_start": "for scoring, which gives no text",
    "routed_experts_prompt_start": "for reinforcement learning, in arrays",
    "trace_decode_token_ids": "for debugging: it dictates the answer",
}


def parse_sampling(given: Mapping[str, Value | None]) -> dict[str, Any]:
    """Return the given parameters as JSON values; `structured_outputs` is an object.

    A flag without a value is given as True; None or an empty list: not given. Raises SamplingError.
    """
    params: dict[str, Any] = {}
    structured: dict[str, Any] = {}
    for parameter in SAMPLING:
        value = given.get(parameter.name)
        if value is None or value is False or value == []:
            continue
        if parameter.member is None:
            params[parameter.name] = _parsed(parameter, value)
        else:
            structured[parameter.member] = _parsed(parameter, value)
    return params | ({"structured_outputs": structured} if structured else {})


def _parsed(parameter: Parameter, value: Value) -> object:
    match parameter.kind, value:
        case _, bool():
            return parameter.kind is Kind.ON
        case Kind.INTEGERS, list(texts):
            return [_integer(parameter, part) for text in texts for part in text.split(",")]
        case Kind.BIASES, list(texts):
            return dict(_bias(parameter, text) for text in texts)
        case Kind.JSON, str(text):
            return _json(parameter, text)
        case _:
            return value


def _integer(parameter: Parameter, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SamplingError(f"{parameter.flag}: {text!r} is not a whole number") from None


def _bias(parameter: Parameter, text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    if not separator:
        raise SamplingError(f"{parameter.flag}: {text!r} is not TOKEN=BIAS, such as 42=-100")
    number = _integer(parameter, token)
    try:
        return number, float(bias)
    except ValueError:
        raise SamplingError(f"{parameter.flag}: {bias!r} is not a number") from None


def _json(parameter: Parameter, text: str) -> object:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SamplingError(f"{parameter.flag}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SamplingError(f"{parameter.flag}: must be a JSON object")
    return value
