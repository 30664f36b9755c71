"""Checks the bounds of sampling parameters before vLLM is imported, which takes seconds.

The bounds are those of vLLM 0.32; a test compares the refusals with the installed `SamplingParams`.
vLLM checks again, with the model's defaults and vocabulary.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engines.offline.sampling import SAMPLING, SamplingError

# vLLM's default of VLLM_MAX_N_SEQUENCES.
MAX_ANSWERS = 16384
# The integers that MessagePack can encode, which vLLM's engine uses.
SMALLEST_INTEGER, LARGEST_INTEGER = -(2**63), 2**64 - 1

Bound = tuple[Callable[[Any], bool], str]


def _between(low: float, high: float) -> Bound:
    return lambda value: low <= value <= high, f"must be from {low:g} to {high:g}"


def _at_least(low: int) -> Bound:
    return lambda value: value >= low, f"must be at least {low}"


_ALL_OR_COUNT: Bound = (lambda value: value >= -1, "must be at least 0, or -1 for all")
_NO_EMPTY_TEXT: Bound = (all, "must not be empty")
BOUNDS: Mapping[str, Bound] = {
    "n": _at_least(1),
    "temperature": _between(0, 2),
    "top_p": (lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
    "top_k": (lambda value: value >= -1, "must be at least 1, or 0 for all tokens"),
    "min_p": _between(0, 1),
    "presence_penalty": _between(-2, 2),
    "frequency_penalty": _between(-2, 2),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "must be above 0"),
    "max_tokens": _at_least(1),
    "min_tokens": _at_least(0),
    "logprobs": _ALL_OR_COUNT,
    "prompt_logprobs": _ALL_OR_COUNT,
    "thinking_token_budget": (lambda value: value >= -1, "must be at least 0, or -1 for no bound"),
    "stop": _NO_EMPTY_TEXT,
    "bad_words": _NO_EMPTY_TEXT,
    "extra_args": (
        lambda value: all(
            SMALLEST_INTEGER <= number <= LARGEST_INTEGER for number in _integers(value)
        ),
        "holds an integer of more than 64 bits",
    ),
}
_FLAGS = {parameter.name: parameter.flag for parameter in SAMPLING}
# Exactly one of these constraints is given; the other members configure it.
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
REPETITION_KEYS = ("max_pattern_size", "min_pattern_size", "min_count")


def check_bounds(params: Mapping[str, Any]) -> None:
    """Raise SamplingError for what vLLM would refuse; `params` is what `parse_sampling` returns."""
    for name, (holds, words) in BOUNDS.items():
        if name in params and not holds(params[name]):
            value = params[name]
            shown = "" if isinstance(value, list | dict) else f", not {value}"
            raise SamplingError(f"{_FLAGS[name]}: {words}{shown}")
    _check_number_of_answers(params)
    most, least = params.get("max_tokens"), params.get("min_tokens", 0)
    if most is not None and least > most:
        raise SamplingError(f"--min-tokens: must be at most --max-tokens, {most}, not {least}")
    if "repetition_detection" in params:
        _check_repetition(params["repetition_detection"])
    if "structured_outputs" in params:
        _check_constraints(params["structured_outputs"])


def _check_number_of_answers(params: Mapping[str, Any]) -> None:
    answers = params.get("n", 1)
    most = os.environ.get("VLLM_MAX_N_SEQUENCES", "")
    limit = int(most) if most.isdecimal() else MAX_ANSWERS
    if answers > limit:
        raise SamplingError(
            f"--n: must be at most {limit} (VLLM_MAX_N_SEQUENCES raises that), not {answers}"
        )
    if answers > 1 and params.get("temperature") == 0:  # others vLLM raises to 0.01 at least
        raise SamplingError(
            f"--n: must be 1 with --temperature 0, where all answers are alike, not {answers}"
        )


def _check_repetition(given: Mapping[str, Any]) -> None:
    flag = _FLAGS["repetition_detection"]
    for key, value in given.items():
        if key not in REPETITION_KEYS:
            raise SamplingError(f"{flag}: unknown key {key!r}; it has {', '.join(REPETITION_KEYS)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise SamplingError(f"{flag}: {key} must be a whole number, 0 or above")
    longest, shortest, count = (given.get(key, 0) for key in REPETITION_KEYS)
    if shortest > longest:
        raise SamplingError(f"{flag}: min_pattern_size must be at most max_pattern_size")
    if longest > 0 and count < 2:
        raise SamplingError(f"{flag}: min_count must be at least 2")


def _check_constraints(given: Mapping[str, Any]) -> None:
    flags = {p.member: p.flag for p in SAMPLING if p.member}
    constraints = [flags[name] for name in CONSTRAINTS if name in given]
    if len(constraints) > 1:
        raise SamplingError(f"only one of {' and '.join(constraints)} can be given")
    if not constraints:
        [first, *_] = (flags[name] for name in given)
        known = ", ".join(flags[name] for name in CONSTRAINTS)
        raise SamplingError(f"{first} needs a constraint to apply to, one of {known}")


def _integers(value: object) -> Iterator[int]:
    """Yield the integers within a JSON value."""
    pending = [value]
    while pending:
        match pending.pop():
            case int(number):
                yield number
            case dict(members):
                pending.extend(members.values())
            case list(members):
                pending.extend(members)
