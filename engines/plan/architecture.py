"""A model's architecture, as far as memory depends on it: read from its config.json, or unknown.

The rules are those of vLLM 0.32's models (`model_executor/models`). A wrong figure would be worse
than none, so an architecture that is not listed here is reported as unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engines.plan.faults import PlanError

Kind = Literal["full", "sliding", "chunked"]

# Decoders whose layers each cache keys and values, by `model_type` of the text model.
ATTENTION = frozenset(
    {
        "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma",
        "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "glm", "glm4", "glm4_moe",
        "gpt_oss", "granite", "granitemoe", "internlm2", "internlm3", "llama", "llama4_text",
        "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2",
        "olmo3", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe",
        "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text",
        "seed_oss", "smollm3", "stablelm", "starcoder2",
    }
)  # fmt: skip
# Decoders that cache one latent vector for a token (multi-head latent attention).
LATENT = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2"})
# Configurations that hold the text model's in a member of their own.
TEXT_MEMBERS = ("text_config", "llm_config", "language_config", "language_model_config")
# Where config.json has no `layer_types`: every n-th layer attends fully, the others to a window.
FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gemma4": 6, "gemma4_text": 6,
              "cohere2": 4, "olmo3": 4}  # fmt: skip
QWEN = ("qwen2", "qwen3")
MAX_LAYERS = 2048
MAX_NUMBER = 2**40


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps of each token: elements per KV head, or one vector for all heads."""

    kind: Kind
    heads: int
    # Elements of keys and values of one head together.
    width: int
    # Tokens that are kept (`sliding`, `chunked`).
    window: int = 0
    # A latent vector: every GPU keeps all of it.
    latent: bool = False
    # Bytes of a token that do not depend on the type of the cache (DeepSeek-V3.2's indexer).
    fixed_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a text model. Lengths in tokens."""

    name: str
    model_type: str
    layers: tuple[Layer, ...]
    decoder_layers: int
    context_length: int
    hidden_size: int
    # Width of the widest feed-forward step of a token, over its experts.
    feed_forward: int
    attention_heads: int
    kv_heads: int
    vocabulary: int
    # Elements of the tables of rotary embeddings.
    rotary_elements: int
    tied: bool
    sparse: bool
    quantization: str | None
    # Type of the cache that the checkpoint asks for, None: that of the model.
    cache_type: str | None
    keys_are_values: bool


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the configuration of the text model."""
    for name in TEXT_MEMBERS:
        if isinstance(inner := config.get(name), dict):
            return inner
    return config


def read_architecture(config: Mapping[str, object]) -> Architecture:
    """Return the architecture of a config.json. Raises PlanError if it is not a known one."""
    text = text_config(config)
    model_type = text.get("model_type", config.get("model_type"))
    names = config.get("architectures")
    name = str(names[0] if isinstance(names, list) and names else model_type)[:100]
    if not isinstance(model_type, str) or model_type not in ATTENTION | LATENT:
        raise PlanError(f"the KV cache of {name} (model type {str(model_type)[:100]}) is not known")
    count = _number(text, "num_hidden_layers", at_most=MAX_LAYERS)
    heads = _number(text, "num_attention_heads")
    kv_heads = _number(text, "num_key_value_heads", heads)
    hidden = _number(text, "hidden_size")
    head = _number(text, "head_dim", max(1, hidden // heads))
    context = _context_length(text)
    sparse = False
    if model_type in LATENT:
        sparse = text.get("index_topk") is not None
        # Each index key, with a scale for every 128 elements.
        index = _number(text, "index_head_dim", 128) if sparse else 0
        width = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim")
        layer = Layer("full", 1, width, latent=True, fixed_bytes=index + index // 128 * 4)
        layers = [layer] * count
        rotary = {_number(text, "qk_rope_head_dim")}
    else:
        layers = _attention_layers(text, model_type, count, kv_heads, head)
        rotary = {layer.width // 2 for layer in layers}
    quantization, cache_type = _quantization(config, text)
    return Architecture(
        name=name,
        model_type=model_type,
        layers=tuple(layers),
        decoder_layers=count,
        context_length=context,
        hidden_size=hidden,
        feed_forward=_feed_forward(text, hidden),
        attention_heads=heads,
        kv_heads=kv_heads,
        vocabulary=_number(text, "vocab_size"),
        rotary_elements=context * sum(rotary),
        tied=config.get("tie_word_embeddings", text.get("tie_word_embeddings")) is True,
        sparse=sparse,
        quantization=quantization,
        cache_type=cache_type,
        keys_are_values=text.get("attention_k_eq_v") is True,
    )


def _attention_layers(
    text: Mapping[str, object], model_type: str, count: int, heads: int, head: int
) -> list[Layer]:
    """Return the layers that cache keys and values of their own."""
    kinds = _kinds(text, model_type, count)
    window = 0
    if "sliding" in kinds:
        window = _number(text, "sliding_window")
    chunk = _number(text, "attention_chunk_size") if "chunked" in kinds else 0
    full = Layer("full", heads, 2 * head)
    if model_type.startswith("gemma4"):
        wide = _number(text, "global_head_dim", 512)
        few = _number(text, "num_global_key_value_heads", heads)
        full = Layer("full", few if text.get("attention_k_eq_v") is True else heads, 2 * wide)
    of_kind = {
        "full": full,
        "sliding": Layer("sliding", heads, 2 * head, window),
        "chunked": Layer("chunked", heads, 2 * head, chunk),
    }
    # The last ones may read the cache of earlier ones.
    shared = _number(text, "num_kv_shared_layers", 0)
    return [of_kind[kind] for kind in kinds[: max(count - shared, 1)]]


def _kinds(text: Mapping[str, object], model_type: str, count: int) -> list[Kind]:
    listed = text.get("layer_types")
    names: dict[str, Kind] = {
        "full_attention": "full",
        "sliding_attention": "sliding",
        "chunked_attention": "chunked",
    }
    if isinstance(listed, list) and len(listed) >= count:
        kinds = [names.get(name) if isinstance(name, str) else None for name in listed[:count]]
        if None in kinds:
            unknown = str(listed[kinds.index(None)])[:100]
            raise PlanError(f"layers of type {unknown} are not known")
        return [kind for kind in kinds if kind is not None]
    if model_type == "gpt_oss":
        return ["full" if index % 2 else "sliding" for index in range(count)]
    if model_type == "llama4_text":
        every = _number(text, "no_rope_layer_interval", 4)
        return ["chunked" if (index + 1) % every else "full" for index in range(count)]
    if model_type.startswith(QWEN) and text.get("use_sliding_window") is not True:
        return ["full"] * count
    if (every := FULL_EVERY.get(model_type, 0)) and text.get("sliding_window"):
        every = _number(text, "sliding_window_pattern", every)
        return ["sliding" if (index + 1) % every else "full" for index in range(count)]
    if model_type.startswith(QWEN):
        after = _number(text, "max_window_layers", 0)
        return ["full" if index < after else "sliding" for index in range(count)]
    return ["sliding" if text.get("sliding_window") else "full"] * count


def _context_length(text: Mapping[str, object]) -> int:
    """Return the tokens of the longest request that vLLM derives from the configuration."""
    length = _number(text, "max_position_embeddings")
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(rope, dict):
        return length
    kind = rope.get("rope_type", rope.get("type"))
    factor = rope.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 4096:
        return length
    if kind == "yarn":
        length = _number(rope, "original_max_position_embeddings", length)
    elif kind not in ("linear", "dynamic"):
        return length
    return int(length * factor)


def _feed_forward(text: Mapping[str, object], hidden: int) -> int:
    dense = _number(text, "intermediate_size", 4 * hidden)
    for name in ("num_experts_per_tok", "top_k_experts", "experts_per_token"):
        if chosen := _number(text, name, 0):
            return max(dense, chosen * _number(text, "moe_intermediate_size", dense))
    return dense


def _quantization(
    config: Mapping[str, object], text: Mapping[str, object]
) -> tuple[str | None, str | None]:
    """Return the method of a quantized checkpoint, and the type of the cache it asks for."""
    found = config.get("quantization_config", text.get("quantization_config"))
    if not isinstance(found, dict):
        return None, None
    scheme = found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        scheme = "fp8" if scheme.get("num_bits") == 8 and scheme.get("type") == "float" else "other"
    cache = None if scheme is None else str(scheme)[:20].lower()
    return str(found.get("quant_method", "unknown"))[:50], cache


def _number(
    config: Mapping[str, object], name: str, default: int | None = None, at_most: int = MAX_NUMBER
) -> int:
    """Return a whole number; Raises PlanError if it is missing or absurd."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 <= value <= at_most or (value == 0 and default != 0):
        said = "is missing" if value is None else f"must be a number, not {str(value)[:50]!r}"
        raise PlanError(f"config.json: {name} {said}")
    return value
