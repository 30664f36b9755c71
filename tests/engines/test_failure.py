"""What an error's words mean, and what they tell to change."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.failure import LONGEST, Cause, classify

FOR_ONE = "To serve at least one request with the model's max seq len (100000), (4.26 GiB KV cache"
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
    def test_what_to_change_has_the_figures_of_the_error(
        self, text: str, cause: Cause, advice: str
    ) -> None:
        failure = classify(text)
        assert (failure.cause, failure.advice) == (cause, advice)

    def test_of_a_file_that_is_not_the_models_nothing_is_advised(self) -> None:
        failure = classify("[Errno 2] No such file or directory: 'ninja'")
        assert (failure.cause, failure.advice) == (Cause.MISSING_FILES, None)

    def test_the_engines_own_advice_gives_way_to_ours(self) -> None:
        failure = classify(FOR_ONE + "Try increasing `gpu_memory_utilization` or so. See https://x")
        assert str(failure) == (
            f"{FOR_ONE.strip().removesuffix('.')}; lower args: max-model-len, or give the KV cache "
            "4.26 GiB"
        )

    def test_the_engines_own_advice_stays_where_we_have_none(self) -> None:
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
            "something that nobody has seen before",
        ],
    )
    def test_what_may_pass_is_worth_another_start(self, text: str) -> None:
        assert not classify(text).lasting

    def test_a_refusal_of_the_configuration_lasts_whatever_it_says(self) -> None:
        failure = classify("something that nobody has seen before", refused=True)
        assert (failure.cause, failure.lasting) == (Cause.BAD_VALUE, True)


class TestMemory:
    TEXT = "CUDA out of memory. Tried to allocate 270.00 MiB."

    def test_what_was_loaded_tells_what_needs_the_memory(self) -> None:
        weights = classify(self.TEXT, loading_weights=True)
        assert weights.cause is Cause.MEMORY_WEIGHTS
        assert "quantized" in (weights.advice or "")
        other = classify(self.TEXT)
        assert other.cause is Cause.MEMORY
        assert other.advice == "lower args: gpu-memory-utilization, max-num-seqs or max-model-len"


class TestSafety:
    @given(st.text(max_size=300), st.booleans(), st.booleans())
    def test_any_text_is_one_bounded_line(self, text: str, loading: bool, refused: bool) -> None:
        failure = classify(text, loading_weights=loading, refused=refused)
        assert len(failure.reason) <= LONGEST
        assert len(str(failure).splitlines()) <= 1

    @given(st.lists(st.sampled_from([*FOR_ONE.split(), "(28)", "--x", "\n", "9" * 400])))
    def test_words_of_errors_in_any_order_never_raise(self, words: list[str]) -> None:
        classify(" ".join(words))
