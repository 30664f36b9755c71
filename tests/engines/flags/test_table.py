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
                {"enable-reasoning": True},
                f"enable-reasoning: vLLM {VERSION} no longer has this flag: reasoning-parser alone "
                "enables it; remove it",
            ),
            # An abbreviation of two flags to argparse.
            (
                {"device": "cuda"},
                f"device: vLLM {VERSION} no longer has this flag: the build of vLLM decides; "
                "remove it",
            ),
            (
                {"disable-prefix-caching": True},
                f"disable-prefix-caching: vLLM {VERSION} has no such flag",
            ),
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

    @pytest.mark.parametrize(
        "args",
        [
            {"max-model-len": 4096},
            {"max_model_len": "4k"},
            {"max-model-len": "-1"},
            {"gpu-memory-util": 0.5},  # argparse takes it for the flag that it begins
            {"max-l": 1},  # or refuses it, where it begins several
            {"max-model-len": "many"},  # values are the parser's
            {"max-model-len": False},
            {"enforce-eager": False},
            {"enforce-eager": None},
            {"compilation-config": {"mode": 3}},
            {"compilation-config.mode": 3},
            {"max-lora-rank": 16},
            {"tool-call-parser": "mine", "tool-parser-plugin": "mine.py"},
            {"reasoning-parser": ""},
        ],
    )
    def test_possibly_valid_flags_have_no_fault(self, args: dict[str, Any]) -> None:
        assert found(**args) == []


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

    def test_digest_ignores_the_model(self) -> None:
        one, other = (digest_command(table(), [f"--model={name}"]) for name in ("a", "b/c"))
        assert one == other

    def test_digest_ignores_the_order_of_flags(self) -> None:
        middleware, dtype = ["--middleware", "a", "b"], ["--dtype=half"]
        one = digest_command(table(), middleware + dtype)
        assert one == digest_command(table(), dtype + middleware)

    def test_digest_depends_on_the_order_of_values(self) -> None:
        values = ["--dtype=half", "--dtype=auto"]
        assert digest_command(table(), values) != digest_command(table(), values[::-1])

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
