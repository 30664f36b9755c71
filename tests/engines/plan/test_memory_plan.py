"""Plans: what fits, and what to change where it does not."""

from pathlib import Path
from typing import Any

import pytest

from engines.plan import (
    PlanError,
    PlanOptions,
    options_of,
    plan_lines,
    plan_memory,
    read_model_files,
)
from tests.engines.plan.checkpoints import published, write_config, write_weights

DEMO = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 4096, "vocab_size": 1183,
}  # fmt: skip

GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 13, "num_key_value_heads": 2, "head_dim": 32,
    "sliding_window": 512, "sliding_window_pattern": 6, "max_position_embeddings": 8192,
}  # fmt: skip


def lines(name: str, directory: Path, gib: float | None = 80.0, **flags: Any) -> list[str]:
    model = read_model_files(str(published(name, directory)))
    args = {flag.replace("_", "-"): value for flag, value in flags.items()}
    return list(plan_lines(plan_memory(model, options_of(args, gib))))


def test_model_that_fits_is_told_in_four_lines(tmp_path: Path) -> None:
    assert lines("qwen2.5-32b", tmp_path) == [
        "weights: 61.03 GiB in 1 file, 61.04 GiB in memory",
        "KV cache: 256 KiB per token in memory, bfloat16 (64 × full attention)",
        "memory: 80 GiB × 0.92, less weights and about 3.32 GiB for activations and CUDA (an "
        "estimate): 9.24 GiB left for the KV cache",
        "capacity: 37,856 tokens, 1.16 requests of 32,768 tokens at once",
    ]


def test_changes_that_make_it_fit_are_named_and_each_of_them_does(tmp_path: Path) -> None:
    *_, said, change = lines("qwen2.5-32b", tmp_path, 77.0)
    assert said == "does not fit: one request of 32,768 tokens needs more than is left"
    flags = change.removeprefix("change one: ").split("; ")
    assert [flag.split()[0] for flag in flags] == [
        "--max-model-len", "--gpu-memory-utilization", "--kv-cache-dtype", "--quantization",
        "--tensor-parallel-size",
    ]  # fmt: skip
    for flag in flags:
        name, value = flag.removeprefix("--").split()
        changed = lines("qwen2.5-32b", tmp_path, 77.0, **{name: value})
        assert changed[-1].startswith("capacity: "), flag


def test_weights_that_are_too_large_ask_for_more_gpus(tmp_path: Path) -> None:
    found = lines("qwen2.5-32b", tmp_path, 24.0)
    assert "too little" in found[2]
    assert found[-1] == "change one: --tensor-parallel-size 4"


def test_gpus_share_the_weights(tmp_path: Path) -> None:
    assert lines("qwen2.5-32b", tmp_path, tensor_parallel_size=4)[:2] == [
        "weights: 61.03 GiB in 1 file, 15.27 GiB in the memory of each of 4 GPUs",
        "KV cache: 64 KiB per token in the memory of each of 4 GPUs, bfloat16 (64 × full "
        "attention)",
    ]


def test_length_beyond_the_context_of_the_model_is_said(tmp_path: Path) -> None:
    assert lines("qwen2.5-32b", tmp_path, 800.0, max_model_len="40000")[-1] == (
        "vLLM will refuse max-model-len 40,000: the context of the model has 32,768 tokens, unless "
        "hf-overrides raises it"
    )


def test_mixed_layers_have_both_counts_of_tokens(tmp_path: Path) -> None:
    found = lines("gemma-4-26b-a4b", tmp_path, kv_cache_memory_bytes=str(26_253_000_000))
    assert found[1:] == [
        "KV cache: at most 220 KiB per token in memory, bfloat16 (25 × window of 1,024 tokens, "
        "5 × full attention)",
        "capacity: 770,034 tokens, 2.94 requests of 262,144 tokens at once (106,816 tokens as "
        "older versions of vLLM count)",
    ]


def test_without_the_gpus_memory_only_sizes_are_known(tmp_path: Path) -> None:
    assert [line.split(":")[0] for line in lines("qwen3-4b", tmp_path, None)] == [
        "weights", "KV cache",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"kv_cache_dtype": "nvfp4"}, "not known: the size of a nvfp4 KV cache is not known"),
        (
            {"quantization": "bitsandbytes"},
            "not known: the size of weights quantized by bitsandbytes while loading is not known",
        ),
    ],
)
def test_what_is_not_known_is_said(flags: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert expected in lines("qwen3-4b", tmp_path, **flags)


def test_unknown_architecture_still_has_its_weights(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    write_config(tmp_path, config)
    write_weights(tmp_path / "model.safetensors", {"w": ("BF16", [2**30])})
    assert list(plan_lines(plan_memory(read_model_files(str(tmp_path)), options_of({}, 80.0)))) == [
        "weights: 2.00 GiB in 1 file",
        "not known: the KV cache of Qwen3NextForCausalLM (model type qwen3_next) is not known",
    ]


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        ({"pipeline-parallel-size": 2}, "the memory of an engine with pipeline-parallel-size is"),
        ({"max-model-len": "long"}, "max-model-len must be a whole number above 0, not 'long'"),
        ({"max-model-len": "9" * 99}, "max-model-len must be a whole number above 0"),
        ({"tensor-parallel-size": True}, "tensor-parallel-size must be a whole number"),
        ({"gpu-memory-utilization": 2}, "gpu-memory-utilization must be above 0 and at most 1"),
    ],
)
def test_flags_that_cannot_be_planned_are_refused(args: dict[str, Any], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        options_of(args, 80.0)


def test_heads_must_be_divisible(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="40 attention heads cannot be divided among 3 GPUs"):
        lines("qwen2.5-32b", tmp_path, tensor_parallel_size=3)


@pytest.mark.parametrize(("text", "tokens"), [("32k", 32_000), ("32K", 32_768), ("1.5k", 1500)])
def test_lengths_have_vllms_units(text: str, tokens: int) -> None:
    assert options_of({"max-model-len": text}, None).max_model_len == tokens


@pytest.mark.parametrize(
    ("changed", "length", "logged"),
    [
        ({}, 2048, "699,008 tokens, 341.31 requests of 2,048 tokens at once"),
        # 11 layers with a window and 2 without, the last group padded.
        (GEMMA, 4096, "424,739 tokens, 103.70 requests of 4,096 tokens at once"),
    ],
)
def test_cpu_engine_has_what_vllm_logged_here(
    changed: dict[str, Any], length: int, logged: str, tmp_path: Path
) -> None:
    write_config(tmp_path, {**DEMO, **changed})
    options = PlanOptions(cache_bytes=2**30, max_model_len=length).for_cpu()
    plan = plan_memory(read_model_files(str(tmp_path)), options)
    assert any(line.startswith(f"capacity: {logged}") for line in plan_lines(plan))


@pytest.mark.parametrize(
    ("changed", "name", "shape"),
    [
        ({"attention_k_eq_v": True}, "model.layers.0.self_attn.k_proj.weight", []),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "model.layers.0.mlp.experts.gate_up_proj_blocks",
            [1, 1, 4],
        ),
    ],
)
def test_tensors_of_shapes_that_no_model_has_are_counted(
    changed: dict[str, Any], name: str, shape: list[int], tmp_path: Path
) -> None:
    write_config(tmp_path, {**DEMO, **changed})
    write_weights(tmp_path / "model.safetensors", {name: ("U8", shape)})
    plan = plan_memory(read_model_files(str(tmp_path)), options_of({}, 80.0))
    assert plan.weight_bytes is not None
