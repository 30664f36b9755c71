"""Errors are classified and get advice."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.flags import table
from engines.output import failure
from engines.output.failure import MAX_REASON, Cause, classify
from tests.app.configuration import isolate, load, process
from tests.fakes import vllm_flags

FOR_ONE = "To serve at least one request with the model's max seq len (100000), (4.26 GiB KV cache"
NUMA = (
    "Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers. Allowed NUMA nodes are "
    "[0]. Please try to bind threads manually or decrease DP/TP/PP."
)
FOR_ONE += " is needed, which is larger than the available KV cache memory (4.25 GiB). "


class TestAdvice:
    @pytest.mark.parametrize(
        ("text", "cause", "advice"),
        [
            (
                FOR_ONE + "Based on the available memory, the estimated maximum model length is "
                "99680. Try increasing `gpu_memory_utilization`",
                Cause.MEMORY_KV_CACHE,
                "set args: {max-model-len: 99680} or less, or give the KV cache 4.26 GiB",
            ),
            (
                FOR_ONE + "Try increasing `gpu_memory_utilization`",
                Cause.MEMORY_KV_CACHE,
                "lower args: max-model-len, or give the KV cache 4.26 GiB",
            ),
            (
                FOR_ONE + "Based on the available memory, the estimated maximum model length is 0.",
                Cause.MEMORY_KV_CACHE,
                "lower args: max-model-len, or give the KV cache 4.26 GiB",
            ),
            (
                "Free memory on device cuda:1 (12.5/79.25 GiB) on startup is less than desired GPU "
                "memory utilization (0.9, 71.3 GiB). Decrease GPU memory utilization",
                Cause.MEMORY_BUSY,
                "end what else uses the device, or set args: {gpu-memory-utilization: 0.15}",
            ),
            (
                "Free memory on device (0.0/79.25 GiB) on startup is less than desired",
                Cause.MEMORY_BUSY,
                "end what else uses the device",
            ),
            (
                "Total number of attention heads (28) must be divisible by tensor parallel size "
                "(8).",
                Cause.PARALLEL_SIZE,
                "set args: tensor-parallel-size to a divisor of 28: 1, 2, 4, 7, 14, 28",
            ),
            (
                "Tensor parallel size (8) cannot be larger than the number of available GPUs (4).",
                Cause.PARALLEL_SIZE,
                "the parallel sizes in args may take 4 GPUs in all",
            ),
            (
                "max_num_batched_tokens (2048) is smaller than max_model_len (4096). This ...",
                Cause.MAX_LENGTH,
                "set args: {max-num-batched-tokens: 4096} or more",
            ),
            (
                "unrecognized arguments: --no-such-flag=3 --other x --other",
                Cause.UNKNOWN_FLAG,
                "remove no-such-flag, other from args",
            ),
            (
                "ambiguous option: --max-m could match --max-model-len, --max-mm",
                Cause.UNKNOWN_FLAG,
                "write max-m out in args",
            ),
            (
                "argument --dtype: invalid choice: 'nope' (choose from 'auto', 'half')",
                Cause.BAD_VALUE,
                "change dtype in args",
            ),
            (
                "argument --tensor-parallel-size/-tp: invalid int value: 'x'",
                Cause.BAD_VALUE,
                "change tensor-parallel-size in args",
            ),
            (
                "Bfloat16 is only supported on GPUs with compute capability of at least 8.0.",
                Cause.BAD_VALUE,
                "set args: {dtype: half}",
            ),
            (
                "Jamba Tool parser could not locate tool calls start/end tokens in the tokenizer!",
                Cause.PARSER_TOKENS,
                "the tokenizer of this model has no such tokens: choose another args: "
                "tool-call-parser",
            ),
            (
                "reasoning helper: 'nope' not found in reasoning_parsers",
                Cause.UNKNOWN_PARSER,
                "change reasoning-parser in args",
            ),
            (
                "[Errno 13] Permission denied: '/models/a/config.json'",
                Cause.NO_PERMISSION,
                "let the user that runs the gateway read it",
            ),
            (
                "libcuda.so.1: cannot open shared object file: No such file or directory",
                Cause.NO_DEVICE,
                "this vLLM was built for a device whose driver is not here: install it, or the CPU "
                "build",
            ),
            (
                "The server socket has failed to listen on any local network address.",
                Cause.ADDRESS_IN_USE,
                "end what listens there, another engine perhaps",
            ),
        ],
    )
    def test_advice_uses_the_figures_of_the_error(
        self, text: str, cause: Cause, advice: str
    ) -> None:
        failure = classify(text)
        assert (failure.cause, failure.advice) == (cause, advice)

    def test_no_advice_for_a_missing_file_outside_the_model(self) -> None:
        failure = classify("[Errno 2] No such file or directory: 'ninja'")
        assert (failure.cause, failure.advice) == (Cause.MISSING_FILES, None)

    def test_advice_replaces_that_of_the_engine(self) -> None:
        failure = classify(FOR_ONE + "Try increasing `gpu_memory_utilization` or so. See https://x")
        assert str(failure) == (
            f"{FOR_ONE.strip().removesuffix('.')}; lower args: max-model-len, or give the KV cache "
            "4.26 GiB"
        )

    def test_advice_of_the_engine_stays_without_ours(self) -> None:
        text = "Something new went wrong. Try increasing the moon. See https://x"
        assert str(classify(text)) == text


class TestLasting:
    @pytest.mark.parametrize(
        "text",
        [
            "CUDA out of memory. Tried to allocate 2.00 GiB.",
            "No available memory for the cache blocks. Try increasing",
            "Free memory on device (1.0/2.0 GiB) on startup is less than desired",
            "[Errno 98] Address already in use",
            "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find "
            "them in the cached files.",
            "something unknown",
        ],
    )
    def test_transient_failure_is_not_lasting(self, text: str) -> None:
        assert not classify(text).permanent

    def test_rejected_configuration_is_lasting(self) -> None:
        failure = classify("something unknown", refused=True)
        assert (failure.cause, failure.permanent) == (Cause.BAD_VALUE, True)


class TestMemory:
    TEXT = "CUDA out of memory. Tried to allocate 270.00 MiB."

    def test_out_of_memory_is_classified_by_phase(self) -> None:
        weights = classify(self.TEXT, loading_weights=True)
        assert weights.cause is Cause.MEMORY_WEIGHTS
        assert "quantized" in (weights.advice or "")
        other = classify(self.TEXT)
        assert other.cause is Cause.MEMORY
        assert other.advice == "lower args: gpu-memory-utilization, max-num-seqs or max-model-len"


class TestSafety:
    @given(st.text(max_size=300), st.booleans(), st.booleans())
    def test_any_text_gives_one_bounded_line(self, text: str, loading: bool, refused: bool) -> None:
        failure = classify(text, loading_weights=loading, refused=refused)
        assert len(failure.reason) <= MAX_REASON
        assert len(str(failure).splitlines()) <= 1

    @given(st.lists(st.sampled_from([*FOR_ONE.split(), "(28)", "--x", "\n", "9" * 400])))
    def test_words_of_errors_in_any_order_never_raise(self, words: list[str]) -> None:
        classify(" ".join(words))


# One error for each advice that uses the figures of the error.
FIGURES = (
    FOR_ONE + "Based on the available memory, the estimated maximum model length is 99680.",
    "max seq len (9) is larger than the maximum number of tokens that can be stored in KV cache "
    "(2048)",
    "Free memory on device cuda:1 (12.5/79.25 GiB) on startup is less than desired",
    "User-specified max_model_len (9) is greater than the derived max_model_len "
    "(max_position_embeddings=2048",
    "max_num_batched_tokens (2048) is smaller than max_model_len (4096).",
    "unrecognized arguments: --no-such-flag=3",
    "ambiguous option: --max-m could match --max-model-len, --max-mm",
    "argument --dtype: invalid choice: 'nope'",
    "Jamba Tool parser could not locate tool calls start/end tokens in the tokenizer!",
    "Reasoning parser could not locate think start/end tokens in the tokenizer!",
    "invalid tool call parser: x (chose from { y })",
    "reasoning helper: 'nope' not found in reasoning_parsers",
    "Total number of attention heads (28) must be divisible by tensor parallel size (8).",
    "Tensor parallel size (8) cannot be larger than the number of available GPUs (4).",
    NUMA,
)
# Words in advice that look like flags, and flags that advice repeats from the error.
NO_FLAGS = frozenset({"no-such-flag", "max-m", "nvidia-smi"})


def _advices() -> list[str]:
    fixed = [advice for _, _, advice in failure._CAUSES if isinstance(advice, str)]
    made = [classify(text).advice for text in FIGURES]
    return [*fixed, *filter(None, made), failure._WEIGHTS_ADVICE, failure._MEMORY_ADVICE]


def test_every_advice_with_figures_has_an_example() -> None:
    patterns = [(p, a) for _, p, a in failure._CAUSES if callable(a)]
    first = {next(a for _, p, a in failure._CAUSES if p.search(text)) for text in FIGURES}
    assert first == {advice for _, advice in patterns}


@pytest.mark.parametrize("advice", _advices())
def test_advice_is_valid_configuration(
    advice: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    isolate(monkeypatch, tmp_path)
    for section, mapping in re.findall(r"(args|env): (\{[^}]*\})", advice):
        text = (
            f"models: [{{name: a, engines: [{{kind: process, model: m, {section}: {mapping}}}]}}]"
        )
        spec = load(text).models[0].engines[0]
        assert spec.kind == "process"
        assert table.find_faults(vllm_flags.table(), spec.args) == []
    for name in re.findall(r"(?<![\w/-])[a-z]+(?:-[a-z]+)+(?![\w/])", advice):
        if name in vllm_flags.table().flags:
            process({name: 1})
        else:
            assert name in NO_FLAGS, advice


class TestVariables:
    def test_non_numeric_variable_is_a_configuration_fault(self) -> None:
        found = classify("invalid literal for int() with base 10: 'one'")
        assert (found.cause, found.permanent) == (Cause.BAD_VALUE, True)
        assert found.advice == "a number is expected: look at the VLLM_ variables in env"


class TestNumaNodes:
    def test_more_ranks_than_numa_nodes_is_a_configuration_fault(self) -> None:
        found = classify(NUMA)
        assert (found.cause, found.permanent) == (Cause.PARALLEL_SIZE, True)
        assert str(found) == (
            "Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers. Allowed NUMA "
            "nodes are [0]; on a CPU each rank needs a NUMA node of its own: tensor-parallel-size "
            "times pipeline-parallel-size in args may be 1 at most, or bind threads by env: "
            "VLLM_CPU_OMP_THREADS_BIND"
        )
