"""What a config.json says of a model's KV cache."""

from typing import Any

import pytest

from engines.plan import PlanError
from engines.plan.architecture import Architecture, read_architecture
from engines.plan.kv_cache import layer_caches

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 128256,
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
}  # fmt: skip


def read(base: dict[str, Any] = LLAMA, **changed: Any) -> Architecture:
    return read_architecture({**base, **changed})


def kinds(architecture: Architecture) -> str:
    return "".join(layer.kind[0] for layer in architecture.layers)


def token_bytes(architecture: Architecture, cache_type: str = "bfloat16", ranks: int = 1) -> int:
    caches = layer_caches(architecture.layers, cache_type, ranks, sparse=architecture.sparse)
    return sum(cache.token_bytes for cache in caches)


class TestTokenBytes:
    def test_grouped_queries_keep_the_heads_of_keys(self) -> None:
        assert token_bytes(read()) == 32 * 8 * 2 * 128 * 2

    def test_fp8_halves_them(self) -> None:
        assert token_bytes(read(), "fp8") == 32 * 8 * 2 * 128

    @pytest.mark.parametrize(("ranks", "heads"), [(2, 4), (8, 1), (16, 1)])
    def test_gpus_share_heads_and_each_has_one_at_least(self, ranks: int, heads: int) -> None:
        assert token_bytes(read(), ranks=ranks) == 32 * heads * 2 * 128 * 2

    def test_head_dim_need_not_follow_from_the_hidden_size(self) -> None:
        assert token_bytes(read(head_dim=64)) == 32 * 8 * 2 * 64 * 2

    @pytest.mark.parametrize("ranks", [1, 8])
    def test_every_gpu_has_the_latent_vector(self, ranks: int) -> None:
        assert token_bytes(read(DEEPSEEK), ranks=ranks) == 61 * 576 * 2

    @pytest.mark.parametrize(("cache_type", "size"), [("bfloat16", 1152), ("fp8", 656)])
    def test_sparse_attention_keeps_an_index_too(self, cache_type: str, size: int) -> None:
        sparse = read(DEEPSEEK, model_type="deepseek_v32", index_topk=2048, index_head_dim=128)
        assert token_bytes(sparse, cache_type) == 61 * (size + 132)

    def test_layers_that_share_a_cache_have_none(self) -> None:
        gemma = read(model_type="gemma4_text", num_kv_shared_layers=12, sliding_window=512)
        assert len(gemma.layers) == 20

    def test_unknown_type_of_cache_is_said(self) -> None:
        with pytest.raises(PlanError, match="the size of a turboquant_k8v4 KV cache is not known"):
            token_bytes(read(), "turboquant_k8v4")


class TestKinds:
    @pytest.mark.parametrize(
        ("changed", "expected"),
        [
            ({}, "ffffff"),
            ({"model_type": "mistral", "sliding_window": 4096}, "ssssss"),
            ({"model_type": "mistral", "sliding_window": None}, "ffffff"),
            ({"model_type": "qwen2", "sliding_window": 4096}, "ffffff"),
            ({"model_type": "gemma2", "sliding_window": 4096}, "sfsfsf"),
            ({"model_type": "gemma3_text", "sliding_window": 1024}, "sssssf"),
            ({"model_type": "gpt_oss", "sliding_window": 128}, "sfsfsf"),
            ({"model_type": "llama4_text", "attention_chunk_size": 8192}, "cccfcc"),
            ({"layer_types": ["sliding_attention"] * 6, "sliding_window": 8}, "ssssss"),
        ],
    )
    def test_layers_follow_the_models_rules(self, changed: dict[str, Any], expected: str) -> None:
        assert kinds(read(num_hidden_layers=6, **changed)) == expected


class TestContextLength:
    @pytest.mark.parametrize(
        ("rope", "expected"),
        [
            (None, 8192),
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
            ({"type": "linear", "factor": 2}, 16384),
            ({"rope_type": "llama3", "factor": 8.0}, 8192),
            ({"rope_type": "linear", "factor": float("inf")}, 8192),
        ],
    )
    def test_stretched_positions_lengthen_it(self, rope: object, expected: int) -> None:
        assert read(rope_scaling=rope).context_length == expected


class TestUnknown:
    @pytest.mark.parametrize("model_type", ["qwen3_next", "jamba", "bert", None, 7, ["llama"]])
    def test_architecture_that_is_not_known_is_named(self, model_type: object) -> None:
        with pytest.raises(PlanError, match=r"^the KV cache of LlamaForCausalLM .* is not known$"):
            read(model_type=model_type)

    def test_kind_of_layer_that_is_not_known_is_named(self) -> None:
        with pytest.raises(PlanError, match="layers of type linear_attention are not known"):
            read(layer_types=["linear_attention"] * 32)

    @pytest.mark.parametrize("value", [None, "many", -1, 0, True, 1.5, 10**30, {}])
    def test_number_that_cannot_be_is_named(self, value: object) -> None:
        with pytest.raises(PlanError, match=r"^config\.json: num_hidden_layers (is missing|must)"):
            read(num_hidden_layers=value)


@pytest.mark.parametrize("kinds", [["linear_attention"] * 32, [["full_attention"]] * 32])
def test_layers_of_another_kind_are_named(kinds: list[Any]) -> None:
    with pytest.raises(PlanError, match=r"layers of type .*attention.* are not known"):
        read(layer_types=kinds)
