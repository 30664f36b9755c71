"""Why an engine did not start, out of logs that vLLM 0.32 wrote."""

import unicodedata
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.failure import LONGEST
from engines.startup import failure_of, plain

LOGS = Path(__file__).parent / "logs"
CORE = "(EngineCore_DP0 pid=71) ERROR 11-21 06:05:50 [core.py:1510] "
NO_MEMORY = "No available memory for the cache blocks."
# vllm/v1/engine/utils.py and vllm/v1/executor/multiproc_executor.py, version 0.32.0
ECHOES = [
    "RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {'EngineCore_DP0': 1}",
    "RuntimeError: Frontend process failed during engine core initialization. "
    "See root cause above. Failed frontend proc(s): {'ApiServer_0': 1}",
    "Exception: WorkerProc initialization failed due to an exception in a background process. "
    "See stack trace for root cause.",
]


STARTS = ["", "ValueError: ", "x.ValidationError: ", "  Value error, ", "entry.py: error: "]
STARTS += ["SystemExit", "\x1b[0m", "a.b.OSError"]


def failure_reason(lines: Iterable[str]) -> str | None:
    failure = failure_of(lines)
    return failure.reason if failure else None


def log(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines()


class TestRealLogs:
    def test_an_unknown_flag_is_named(self) -> None:
        assert failure_reason(log("unknown_flag")) == "unrecognized arguments: --no-such-flag=3"

    def test_a_missing_model_is_told_in_words_for_an_operator(self) -> None:
        assert failure_reason(log("missing_model")) == (
            "the model is neither a directory here nor in the local Hugging Face cache, "
            "and downloads are off (HF_HUB_OFFLINE)"
        )

    def test_too_long_a_context_is_told_with_both_lengths(self) -> None:
        assert failure_reason(log("context_too_long")) == (
            "User-specified max_model_len (99999) is greater than the derived max_model_len "
            "(max_position_embeddings=4096.0 or model_max_length=None in model's config.json)."
        )

    def test_an_unknown_parser_is_named_with_the_known_ones(self) -> None:
        reason = failure_reason(log("unknown_parser"))
        assert reason is not None
        assert reason.strip("\"'").startswith(
            "Reasoning parser 'nope' not found. Available parsers: cohere_command3, "
            "cohere_command4, deepseek_r1, deepseek_v3, deepseek_v4, deepseek_v41, ernie45, "
        )
        assert len(reason) <= LONGEST

    def test_a_start_that_went_well_has_no_reason(self) -> None:
        lines = log("healthy")
        assert any("Application startup complete" in line for line in lines)
        assert failure_reason(lines) is None

    @pytest.mark.parametrize(
        "name", ["unknown_flag", "missing_model", "context_too_long", "unknown_parser"]
    )
    def test_a_log_that_was_cut_before_its_error_has_no_reason(self, name: str) -> None:
        lines = log(name)
        assert failure_reason(lines[:4]) is None

    @pytest.mark.parametrize("name", ["context_too_long", "unknown_parser", "missing_model"])
    def test_lines_prefixed_by_their_process_give_the_same_reason(self, name: str) -> None:
        """Below the API server every line of a traceback has a prefix."""
        lines = log(name)
        assert failure_reason([CORE + line for line in lines[4:]]) == failure_reason(lines)


class TestCauses:
    @pytest.mark.parametrize("lines", [[], [""], ["\n"], ["no error here"], ["Traceback:"]])
    def test_no_error_means_no_reason(self, lines: list[str]) -> None:
        assert failure_reason(lines) is None

    def test_an_error_in_the_middle_of_a_line_is_talk(self) -> None:
        line = "WARNING 11-21 06:05:50 [x.py:1] errors like `OSError: [Errno 24]` may come"
        assert failure_reason([line]) is None

    @pytest.mark.parametrize("echo", ECHOES)
    def test_an_error_that_only_reports_another_is_passed_over(self, echo: str) -> None:
        lines = [
            CORE + "EngineCore failed to start.",
            CORE + "Traceback (most recent call last):",
            CORE + f"ValueError: {NO_MEMORY}",
            "(APIServer pid=70) Traceback (most recent call last):",
            f"(APIServer pid=70) {echo}",
        ]
        assert failure_reason(lines) == NO_MEMORY

    @pytest.mark.parametrize("echo", ECHOES)
    def test_an_echo_is_better_than_nothing(self, echo: str) -> None:
        assert failure_reason([echo]) == echo.partition(": ")[2]

    def test_the_last_cause_wins(self) -> None:
        lines = [
            "ImportError: cannot import name 'x'",
            "During handling of the above exception, another exception occurred:",
            f"ValueError: {NO_MEMORY}",
        ]
        assert failure_reason(lines) == NO_MEMORY

    @pytest.mark.parametrize("name", ["SystemExit: 1", "KeyboardInterrupt", "SystemExit"])
    def test_being_ended_is_no_cause(self, name: str) -> None:
        assert failure_reason([f"ValueError: {NO_MEMORY}", name]) == NO_MEMORY
        assert failure_reason([name]) is None

    def test_an_error_without_text_is_told_by_its_name(self) -> None:
        assert failure_reason(["torch.OutOfMemoryError"]) == "OutOfMemoryError"
        assert failure_reason(["AssertionError"]) == "AssertionError"

    @pytest.mark.parametrize(
        "name",
        ["ValueError", "torch.OutOfMemoryError", "a.b_c.errors.GatedRepoError", "Exception"],
    )
    def test_an_error_is_told_without_its_class(self, name: str) -> None:
        assert failure_reason([f"{name}: {NO_MEMORY}"]) == NO_MEMORY

    def test_a_value_error_that_belongs_to_no_pydantic_error_is_talk(self) -> None:
        lines = [f"ValueError: {NO_MEMORY}", "  Value error, of something else"]
        assert failure_reason(lines) == NO_MEMORY


class TestPlain:
    @pytest.mark.parametrize(
        ("raw", "wanted"),
        [
            ("(APIServer pid=70) INFO 11-21 06:05:50 [model.py:733] text", "text"),
            ("(EngineCore_DP0 pid=7) ERROR 11-21 06:05:50 [core.py:1] [x] text", "text"),
            ("(Worker_TP0 pid=7) text", "text"),
            ("WARNING 11-21 06:05:50 [x.py:1] text", "text"),
            ("\x1b[1;36m(APIServer pid=70)\x1b[0;0m INFO 11-21 06:05:50 [x.py:1] text", "text"),
            ("\x1b[31mtext\x1b[0m", "text"),
            ("text  \r", "text"),
            ("  text", "  text"),
            ("te\x00\x07xt\x08", "text"),
            ("", ""),
        ],
    )
    def test_a_line_is_told_without_what_is_around_it(self, raw: str, wanted: str) -> None:
        assert plain(raw) == wanted


class TestSafety:
    @pytest.mark.parametrize(
        "text",
        [
            "\x1b[31mred\x1b[0m",
            "\x1b]0;title\x07",
            "a\rb\x08\x7f",
            "\x9b31mred",
            "a\u2028b\x85c\x0bd",
            "\x00",
        ],
    )
    def test_a_reason_holds_no_control_characters(self, text: str) -> None:
        reason = failure_reason([f"ValueError: x {text} y"])
        assert reason is not None
        assert reason.startswith("x")
        assert reason.endswith("y")
        assert not [char for char in reason if unicodedata.category(char) in ("Cc", "Zl", "Zp")]

    @pytest.mark.parametrize("text", ["x" * 100_000, "x " * 100_000, "\x1b[" * 50_000])
    def test_a_reason_is_bounded(self, text: str) -> None:
        for line in (f"ValueError: {text}", f"entry.py: error: {text}", f"a.{text}Error: y"):
            reason = failure_reason([line])
            assert reason is None or 0 < len(reason) <= LONGEST

    @pytest.mark.parametrize(
        "line", ["a." * 20_000, "A" * 40_000, "x.py" * 10_000, "(" * 40_000, "[x] " * 10_000]
    )
    def test_a_hostile_line_takes_no_time(self, line: str) -> None:
        assert failure_reason([line, f"INFO 11-21 06:05:50 {line}"]) is None

    @given(
        st.lists(
            st.builds(
                str.__add__,
                st.sampled_from([*STARTS, CORE]),
                st.text(max_size=20) | st.binary(max_size=20).map(lambda b: b.decode("latin-1")),
            ),
            max_size=8,
        )
    )
    @settings(max_examples=200, deadline=None)
    def test_garbage_never_raises_and_stays_one_line(self, lines: list[str]) -> None:
        reason = failure_reason(lines)
        if reason is not None:
            assert 0 < len(reason) <= LONGEST
            assert len(reason.splitlines()) == 1
            assert reason == reason.strip()

    @given(st.binary(max_size=300))
    @settings(max_examples=100, deadline=None)
    def test_binary_garbage_never_raises(self, data: bytes) -> None:
        reason = failure_reason(data.decode("utf-8", "replace").split("\n"))
        assert reason is None or "\n" not in reason
