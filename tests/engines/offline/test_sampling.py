"""Sampling flags: parsing, refusals, and completeness compared with vLLM."""

from typing import Any

import pytest

from engines.offline.sampling import (
    LEFT_OUT,
    SAMPLING,
    Kind,
    SamplingError,
    Value,
    parse_sampling,
)

# vLLM's type annotations for each kind; `str | list[str]` and a schema as `str | dict` too.
TYPES = {
    Kind.INTEGER: {"int", "int | None"},
    Kind.NUMBER: {"float"},
    Kind.TEXT: {"str | None"},
    Kind.ON: {"bool", "bool | None"},
    Kind.OFF: {"bool", "bool | None"},
    Kind.JSON: {"dict[str, Any] | None", "str | dict | None", "RepetitionDetectionParams | None"},
    Kind.INTEGERS: {"list[int] | None"},
    Kind.TEXTS: {"list[str] | None", "str | list[str] | None"},
    Kind.BIASES: {"dict[int, float] | None"},
}


def fields(cls: Any) -> dict[str, str]:
    """Return the annotation of each field of a class."""
    written = {
        name: kind.__name__ if isinstance(kind, type) else str(kind)
        for name, kind in cls.__annotations__.items()
    }
    return {
        name: kind.replace("typing.", "").replace("vllm.sampling_params.", "")
        for name, kind in written.items()
    }


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn, of their own dependencies
def test_table_matches_the_installed_vllm() -> None:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    params, members = fields(SamplingParams), fields(StructuredOutputsParams)
    defaults = SamplingParams()
    for parameter in SAMPLING:
        kind = members[parameter.member] if parameter.member else params[parameter.name]
        assert kind in TYPES[parameter.kind], parameter.name
        if parameter.member is None and parameter.kind in (Kind.ON, Kind.OFF):
            default = getattr(defaults, parameter.name)
            assert default in (None, parameter.kind is Kind.OFF), parameter.name
    named = {p.name for p in SAMPLING if p.member is None} | LEFT_OUT.keys()
    assert named == {name for name in params if not name.startswith("_")}
    assert {p.member for p in SAMPLING if p.member} == {m for m in members if m[0] != "_"}


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn, of their own dependencies
def test_bounds_are_those_of_the_installed_vllm() -> None:
    from engines.offline.worker import UserError, sampling_params

    bounded = [parameter for parameter in SAMPLING if parameter.low is not None]
    assert len(bounded) == 13
    for parameter in bounded:
        whole = parameter.kind is Kind.INTEGER
        edges = [(parameter.low, -1), (parameter.high, 1)]
        for edge, beyond in ((edge, beyond) for edge, beyond in edges if edge is not None):
            outside = edge + beyond if whole else edge + beyond * 0.01
            # 0 itself is refused for two parameters, which min= cannot say.
            inside = edge if whole or edge else 0.01
            sampling_params({}, {parameter.name: int(inside) if whole else float(inside)})
            with pytest.raises(UserError):
                sampling_params({}, {parameter.name: int(outside) if whole else float(outside)})


def test_values_are_parsed_to_vllms_types() -> None:
    given: dict[str, Value | None] = {
        "temperature": 0.5,
        "n": 2,
        "seed": None,
        "stop": ["a", "b"],
        "bad_words": [],
        "stop_token_ids": ["1,2", "3"],
        "logit_bias": ["5=-100", "6=1.5"],
        "ignore_eos": True,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "extra_args": '{"a": 1}',
        "json_schema": '{"type": "object"}',
        "disable_any_whitespace": True,
    }
    assert parse_sampling(given) == {
        "temperature": 0.5,
        "n": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2, 3],
        "logit_bias": {5: -100.0, 6: 1.5},
        "ignore_eos": True,
        "skip_special_tokens": False,
        "extra_args": {"a": 1},
        "structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": True},
    }
    assert parse_sampling({}) == {}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("stop_token_ids", ["1,,2"], "--stop-token-ids: '' is not a whole number"),
        ("logit_bias", ["7"], "--logit-bias: '7' is not TOKEN=BIAS, such as 42=-100"),
        ("logit_bias", ["1=a"], "--logit-bias: 'a' is not a number"),
        ("logit_bias", ["a=1"], "--logit-bias: 'a' is not a whole number"),
        ("json_schema", "{", "--json-schema: not JSON: Expecting property name enclosed"),
        ("json_schema", "[" * 100_000, "--json-schema: not JSON: maximum recursion depth"),
        ("extra_args", "1", "--extra-args: must be a JSON object"),
    ],
)
def test_wrong_type_is_a_one_line_error(name: str, value: str | list[str], said: str) -> None:
    with pytest.raises(SamplingError) as caught:
        parse_sampling({name: value})
    assert str(caught.value).startswith(said)


def test_flags_are_unique() -> None:
    flags = [parameter.flag for parameter in SAMPLING]
    assert len(set(flags)) == len(flags)
