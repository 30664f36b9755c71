"""The bounds of sampling parameters, and that they are vLLM's."""

import itertools
import math
from typing import Any

import pytest

from engines.offline.sampling import SamplingError
from engines.offline.sampling_bounds import BOUNDS, REPETITION_KEYS, check_bounds

NUMBERS = (-101, -3, -2.1, -2, -1.5, -1, -0.1, 0, 1e-6, 0.005, 0.5, 1, 1.5, 2, 2.1, 3, 101)
FLOATS = (*map(float, NUMBERS), math.nan, math.inf, -math.inf)
INTEGERS = tuple(number for number in NUMBERS if isinstance(number, int))
FRACTIONS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
COUNTS = (
    "n", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "thinking_token_budget",
)  # fmt: skip
TEXTS: tuple[dict[str, Any], ...] = (
    {"stop": ["a", ""]},
    {"stop": ["a"]},
    {"bad_words": [""]},
    {"bad_words": ["a"]},
    {"extra_args": {"a": [{"b": 2**64}]}},
    {"extra_args": {"a": [{"b": 2**64 - 1}, -(2**63), 0.5, "c"]}},
    {"extra_args": {"a": -(2**63) - 1}},
)
TOGETHER: tuple[dict[str, Any], ...] = (
    *({"n": n, "temperature": t} for n, t in itertools.product((1, 2), (0.0, 1e-6, 1e-4, 0.5))),
    *({"min_tokens": low, "max_tokens": high} for low, high in ((1, 2), (2, 2), (3, 2))),
    {"n": 16385},
    {"n": 16384},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
    {"structured_outputs": {"disable_any_whitespace": True}},
    *(
        {"repetition_detection": dict(zip(REPETITION_KEYS, values, strict=True))}
        for values in itertools.product((0, 1, 3), (0, 2), (0, 1, 2))
    ),
    {"repetition_detection": {"max_pattern_size": -1}},
    {"repetition_detection": {"sizes": 1}},
)  # fmt: skip
GIVEN: tuple[dict[str, Any], ...] = (
    *({name: value} for name in FRACTIONS for value in FLOATS),
    *({name: value} for name in COUNTS for value in INTEGERS),
    *TEXTS,
    *TOGETHER,
)


def refused(given: dict[str, Any]) -> bool:
    try:
        check_bounds(given)
    except SamplingError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn, of their own dependencies
def test_refusals_are_exactly_those_of_vllm() -> None:
    from engines.offline.worker import UserError, sampling_params

    def refused_by_vllm(given: dict[str, Any]) -> bool:
        try:
            sampling_params({}, given)
        except UserError:
            return True
        return False

    differ = [given for given in GIVEN if refused(given) is not refused_by_vllm(given)]
    assert differ == []
    assert {name for given in GIVEN for name in given} >= BOUNDS.keys()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": 3.0}, "--temperature: must be from 0 to 2, not 3.0"),
        ({"top_p": 0.0}, "--top-p: must be above 0 and at most 1, not 0.0"),
        ({"max_tokens": 0}, "--max-tokens: must be at least 1, not 0"),
        ({"stop": [""]}, "--stop: must not be empty"),
        ({"logprobs": -2}, "--logprobs: must be at least 0, or -1 for all, not -2"),
        ({"extra_args": {"a": 2**64}}, "--extra-args: holds an integer of more than 64 bits"),
        (
            {"min_tokens": 3, "max_tokens": 2},
            "--min-tokens: must be at most --max-tokens, 2, not 3",
        ),
        (
            {"n": 2, "temperature": 0.0},
            "--n: must be 1 with --temperature 0, where all answers are alike, not 2",
        ),
        (
            {"n": 20000},
            "--n: must be at most 16384 (VLLM_MAX_N_SEQUENCES raises that), not 20000",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "only one of --regex and --choice can be given",
        ),
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "--whitespace-pattern needs a constraint to apply to, one of --json-schema, --regex, "
            "--choice, --grammar, --json-object, --structural-tag",
        ),
        (
            {"repetition_detection": {"size": 3}},
            "--repetition-detection: unknown key 'size'; it has max_pattern_size, "
            "min_pattern_size, min_count",
        ),
        (
            {"repetition_detection": {"max_pattern_size": "3"}},
            "--repetition-detection: max_pattern_size must be a whole number, 0 or above",
        ),
        (
            {"repetition_detection": {"min_pattern_size": 3}},
            "--repetition-detection: min_pattern_size must be at most max_pattern_size",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 3}},
            "--repetition-detection: min_count must be at least 2",
        ),
    ],
)
def test_value_out_of_bounds_is_a_one_line_error(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SamplingError) as caught:
        check_bounds(given)
    assert str(caught.value) == said


def test_environment_raises_the_limit_of_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "20000")
    check_bounds({"n": 20000})
    with pytest.raises(SamplingError, match="at most 20000"):
        check_bounds({"n": 20001})


def test_deeply_nested_json_is_checked() -> None:
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    check_bounds({"extra_args": {"a": deep}})
