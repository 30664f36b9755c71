"""Engine flags and sampling parameters as vLLM parses them, and its refusals."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from engines.offline import Job, Prompt
from engines.offline.worker import (
    CommandChannel,
    UserError,
    parse_engine_args,
    reasoning_parser_class,
    run,
    sampling_params,
)
from tests.e2e.deployment import demo_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn, of their own dependencies
]


def test_engine_flags_are_parsed_as_by_vllm_serve(tmp_path: Path) -> None:
    model = str(tmp_path)  # a directory: vLLM looks for a name in its cache where it is offline
    args = parse_engine_args(
        model,
        [
            ("max-model-len", "1k"),
            ("enforce_eager", "True"),
            ("enable-prefix-caching", "false"),
            ("hf-overrides", '{"a": 1}'),
        ],
    )
    assert (args.model, args.max_model_len, args.enforce_eager) == (model, 1000, True)
    assert (args.enable_prefix_caching, args.hf_overrides) == (False, {"a": 1})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "max-model-lenn",
            "1",
            "--engine max-model-lenn: vLLM has no such engine flag; did you mean max-model-len?",
        ),
        ("port", "80", "--engine port: vLLM has no such engine flag"),
        ("model", "n", "--engine model: vLLM has no such engine flag"),
        ("help", "true", "--engine help: vLLM has no such engine flag"),
        ("enforce-eager", "yes", "--engine enforce-eager: 'yes' is neither true nor false"),
        ("max-model-len", "long", "engine flag --max-model-len: "),
        ("dtype", "float13", "engine flag --dtype: invalid choice: 'float13'"),
    ],
)
def test_refused_engine_flag_is_a_one_line_error(key: str, value: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_engine_args("m", [(key, value)])
    assert str(caught.value).startswith(said)


def test_given_parameters_override_the_models_defaults() -> None:
    params = sampling_params(
        {"temperature": 0.6, "top_k": 20},
        {
            "temperature": 0.1,
            "logit_bias": {"5": 1.0},
            "structured_outputs": {"choice": ["a", "b"]},
            "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
        },
    )
    assert (params.temperature, params.top_k, params.max_tokens) == (0.1, 20, None)
    assert (params.logit_bias, params.structured_outputs.choice) == ({5: 1.0}, ["a", "b"])
    assert params.repetition_detection.min_count == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": 3.0}, "sampling: temperature must be in [0, 2], got 3.0."),
        ({"temperature": 0.0, "n": 2}, "sampling: n must be 1 when using greedy sampling, got 2."),
        ({"max_tokens": 0}, "sampling: max_tokens must be at least 1, got 0."),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "sampling: You must use one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "sampling: You can only use one"),
        ({"repetition_detection": {"n": 3}}, "sampling: repetition_detection has no 'n'"),
    ],
)
def test_refused_sampling_parameter_is_a_one_line_error(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        sampling_params({}, given)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_sampling_is_refused_before_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("it loads the model")

    monkeypatch.setattr("vllm.LLM.from_engine_args", load)
    # `run` sets them for the engine.
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "0")
    job = Job(model=str(demo_model()), prompts=(Prompt("a"),), sampling={"n": 2})
    with pytest.raises(UserError, match="n must be 1 when using greedy sampling") as caught:
        run(job, Mock(spec=CommandChannel))
    assert "(the model's defaults are {" in str(caught.value)


def test_reasoning_parser_is_found_by_name() -> None:
    assert reasoning_parser_class("auto") is None
    assert reasoning_parser_class("none") is None
    assert reasoning_parser_class("qwen3") is not None
    with pytest.raises(UserError, match=r"vLLM has no 'q'; it has auto, none, "):
        reasoning_parser_class("q")
