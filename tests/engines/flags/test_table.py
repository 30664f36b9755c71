"""Faults in flags found by the table, and rejections by vLLM's parser."""

from typing import Any

import pytest

from engines.flags.table import FlagFault, digest_command, find_faults, parse_rejection
from tests.app.configuration import process
from tests.fakes.vllm_flags import table

VERSION = table().version


def found(**args: Any) -> list[str]:
    """Return the faults in flags."""
    return [f"{one.flag}: {one.message}" for one in find_faults(table(), process(args).args)]


class TestFaults:
    @pytest.mark.parametrize(
        ("args", "line"),
        [
            (
                {"max-modellen": 1},
                f"max-modellen: vLLM {VERSION} has no such flag; did you mean max-model-len?",
            ),
            ({"qqqq": 1}, f"qqqq: vLLM {VERSION} has no such flag"),
            (
                {"no_such": False},
                f"no-such: vLLM {VERSION} has no such flag",
            ),
            (
                {"dtype": "bflot16"},
                "dtype: must be auto, bfloat16, float, float16, float32 or half, not 'bflot16'; "
                "did you mean bfloat16?",
            ),
            (
                {"tensor_parallel_size": "two"},
                "tensor-parallel-size: takes a whole number, not 'two'",
            ),
            (
                {"tensor-parallel-size": 1.5},
                "tensor-parallel-size: takes a whole number, not '1.5'",
            ),
            ({"swap-space": "x"}, f"swap-space: vLLM {VERSION} has no such flag"),
            (
                {"gpu-memory-utilization": "much"},
                "gpu-memory-utilization: takes a number, not 'much'",
            ),
            ({"enforce-eager": 1}, "enforce-eager: is true or false, not 1"),
            ({"enforce-eager": "yes"}, "enforce-eager: is true or false, not 'yes'"),
            ({"max-model-len": False}, "max-model-len: takes a whole number, not false"),
            ({"max-model-len": True}, "max-model-len: takes a whole number, not true"),
            ({"seed": [1, 2]}, "seed: takes a whole number, not a list"),
            (
                {"tool-call-parser": "hermess"},
                f"tool-call-parser: vLLM {VERSION} has no parser 'hermess'; did you mean hermes?",
            ),
            (
                {"reasoning-parser": "qwen-3"},
                f"reasoning-parser: vLLM {VERSION} has no parser 'qwen-3'; did you mean qwen3?",
            ),
        ],
    )
    def test_mistake_is_one_fault(self, args: dict[str, Any], line: str) -> None:
        assert found(**args) == [line]

    def test_ambiguous_abbreviation_names_some_of_its_flags(self) -> None:
        [line] = found(**{"max-l": 1})
        assert line.startswith("max-l: stands for 5 flags of vLLM, max-log-len, max-logprobs, ")

    @pytest.mark.parametrize(
        "args",
        [
            {"max-model-len": 4096},
            {"max_model_len": "4k"},
            {"max-model-len": "-1"},
            {"gpu-memory-util": 0.5},  # argparse takes it for the flag that it begins
            {"gpu-memory-utilization": "5e-1"},
            {"seed": "1_0"},  # int() does
            {"enforce-eager": False},
            {"enforce-eager": None},
            {"compilation-config": {"mode": 3}},
            {"compilation-config.mode": 3},
            {"lora-modules": ["a=b"]},
            {"max-lora-rank": 16},
            {"tool-call-parser": "mine", "tool-parser-plugin": "mine.py"},
            {"reasoning-parser": ""},
        ],
    )
    def test_possibly_valid_flags_have_no_fault(self, args: dict[str, Any]) -> None:
        assert found(**args) == []

    def test_secret_value_is_not_shown(self) -> None:
        secret = table(flags={"hf-token": {"kind": "integer", "choices": []}})
        [fault] = find_faults(secret, {"hf-token": "canary"})
        assert fault.message == "takes a whole number, not that"


class TestRejections:
    @pytest.mark.parametrize(
        ("text", "flag", "message"),
        [
            (
                "argument --max-model-len: invalid human_readable_int_or_auto value: '4q'",
                "max-model-len",
                "it does not take '4q'",
            ),
            (
                "Error: --enable-auto-tool-choice requires --tool-call-parser",
                "enable-auto-tool-choice",
                "--enable-auto-tool-choice requires --tool-call-parser",
            ),
            (
                "argument --compilation-config/-cc: 1 validation error for CompilationConfig\n"
                "level\n  Unexpected keyword argument [type=unexpected_keyword_argument, "
                "input_value=9, input_type=int]\n    For further information visit https://x",
                "compilation-config",
                "level: Unexpected keyword argument",
            ),
            (
                "The chat template (/nope) doesn't exist! (parameter=chat_template)",
                "chat-template",
                "The chat template (/nope) doesn't exist! (parameter=chat_template)",
            ),
            ("something else", None, "something else"),
        ],
    )
    def test_flag_and_reason_are_found(self, text: str, flag: str | None, message: str) -> None:
        names = ("max-model-len", "enable-auto-tool-choice", "compilation-config", "chat-template")
        args = dict.fromkeys(names, "x")
        assert parse_rejection(text, args) == FlagFault(flag, f"vLLM refuses it: {message}")

    def test_secret_value_in_a_rejection_is_not_shown(self) -> None:
        fault = parse_rejection("argument --hf-token: not canary", {"hf-token": "canary"})
        assert fault == FlagFault("hf-token", "vLLM refuses its value")

    def test_long_rejection_is_cut(self) -> None:
        assert len(parse_rejection("word " * 1000, {}).message) < 250


class TestDigest:
    def test_digest_ignores_whole_numbers(self) -> None:
        one, other = (digest_command(table(), [f"--max-model-len={n}"]) for n in (1, 4096))
        assert one == other

    @pytest.mark.parametrize(
        "pair",
        [
            ("--max-model-len=1", "--max-model-len=1k"),
            ("--max-model-len=1", "--max-model-len=-1"),
            ("--max-lora-rank=1", "--max-lora-rank=3"),
            ("--chat-template=1", "--chat-template=2"),
            ("--max-model-len=1", "--seed=1"),
        ],
    )
    def test_digest_depends_on_everything_else(self, pair: tuple[str, str]) -> None:
        one, other = (digest_command(table(), [word]) for word in pair)
        assert one != other
