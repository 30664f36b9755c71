"""The kinds of media that a model takes, by the architecture that its config.json names.

Of an architecture that is not listed nothing is said: a wrong refusal would be worse than none. The
names are those of vLLM 0.32 (`model_executor/models/registry.py`), the kinds those of each model's
`get_supported_mm_limits`.
"""

from collections.abc import Mapping

from engines.plan.faults import PlanError
from engines.plan.model_files import read_config

NONE: frozenset[str] = frozenset()
IMAGE, IMAGE_VIDEO = frozenset({"image"}), frozenset({"image", "video"})
AUDIO, IMAGE_AUDIO = frozenset({"audio"}), frozenset({"image", "audio"})

TEXT_ONLY = (
    "ApertusForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM", "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM", "Exaone4ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM", "InternLM2ForCausalLM",
    "InternLM3ForCausalLM", "LlamaForCausalLM", "MiniMaxM2ForCausalLM", "MistralForCausalLM",
    "MixtralForCausalLM", "NemotronForCausalLM", "NemotronHForCausalLM", "OlmoeForCausalLM",
    "Phi3ForCausalLM", "PhiMoEForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "StableLmForCausalLM",
)  # fmt: skip
MEDIA: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(TEXT_ONLY, NONE),
    "Gemma3ForConditionalGeneration": IMAGE,
    "Gemma3nForConditionalGeneration": IMAGE_AUDIO,
    "Glm4vForConditionalGeneration": IMAGE_VIDEO,
    "Glm4vMoeForConditionalGeneration": IMAGE_VIDEO,
    "KimiVLForConditionalGeneration": IMAGE,
    "Llama4ForConditionalGeneration": IMAGE,
    "LlavaForConditionalGeneration": IMAGE,
    "LlavaNextForConditionalGeneration": IMAGE,
    "Mistral3ForConditionalGeneration": IMAGE,
    "Phi4MMForCausalLM": IMAGE_AUDIO,
    "PixtralForConditionalGeneration": IMAGE,
    "Qwen2AudioForConditionalGeneration": AUDIO,
    "Qwen2VLForConditionalGeneration": IMAGE_VIDEO,
    "Qwen2_5_VLForConditionalGeneration": IMAGE_VIDEO,
    "Qwen3VLForConditionalGeneration": IMAGE_VIDEO,
    "Qwen3VLMoeForConditionalGeneration": IMAGE_VIDEO,
    "VoxtralForConditionalGeneration": AUDIO,
    "WhisperForConditionalGeneration": AUDIO,
}
# Flags and variables by which vLLM takes another configuration, or another implementation.
ELSEWHERE = frozenset(
    {"config-format", "download-dir", "hf-config-path", "hf-overrides", "model-impl", "revision"}
)
_VARIABLES = ("HF_", "VLLM_USE_MODELSCOPE", "XDG_CACHE_HOME")


def media_of_model(
    model: str, args: Mapping[str, object], env: Mapping[str, str]
) -> frozenset[str] | None:
    """Return which of `image`, `audio` and `video` a model takes; None: not known. Reads a file.

    `args` and `env` are those of its engine.
    """
    if ELSEWHERE & args.keys() or any(name.startswith(_VARIABLES) for name in env):
        return None
    try:
        names = read_config(model).get("architectures")
    except PlanError:
        return None
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return None
    return MEDIA.get(names[0])
