"""Flags that vLLM no longer has, with what to do instead, and the flag that an unknown one means.

Collected from the history of vLLM's parser up to the pinned version; a test compares the table with
that version's flags.
"""

import difflib
from collections.abc import Collection, Mapping

_SPECULATIVE = "write it into the JSON of speculative-config, as `{KEY}`"
_STRUCTURED = "write `{KEY}` into the JSON of structured-outputs-config"
_EPLB = "write `{KEY}` into the JSON of eplb-config"
_POOLER = "write `{KEY}` into the JSON of pooler-config"
_PROMPT_ADAPTER = "prompt adapters are gone; use LoRA adapters"
_IMAGES = "vLLM reads it from the model; remove it"
_SCHEDULER = "vLLM's present scheduler does this by itself; remove it"
_GRAPHS = "max-cudagraph-capture-size, a number of tokens in a batch, is its successor"
_WORKERS = "distributed-executor-backend: ray is its successor; without Ray, remove it"

# Flag: one sentence without a full stop.
REMOVED_FLAGS: Mapping[str, str] = {
    "calculate-kv-scales": "scales of the KV cache come with the model's weights; remove it",
    "chat-template-text-format": "chat-template-content-format is its successor",
    "cuda-graph-sizes": "cudagraph-capture-sizes is its successor",
    "device": "the build of vLLM decides; remove it",
    "disable-async-output-proc": _SCHEDULER,
    "disable-frontend-multiprocessing": "vLLM's server always runs beside its engine; remove it",
    "disable-image-processor": _IMAGES,
    "disable-log-requests": "requests are no longer logged by default; remove it",
    "disable-logprobs-during-spec-decoding": "vLLM decides by itself; remove it",
    "disable-mm-preprocessor-cache": "mm-processor-cache-gb: 0 is its successor",
    "enable-lora-bias": "biases in LoRA adapters are gone; remove it",
    "enable-multimodal-encoder-data-parallel": "mm-encoder-tp-mode: data is its successor",
    "enable-prompt-adapter": _PROMPT_ADAPTER,
    "enable-reasoning": "reasoning-parser alone enables it; remove it",
    "engine-use-ray": _WORKERS,
    "eplb-log-balancedness": _EPLB.format(KEY="log_balancedness"),
    "eplb-step-interval": _EPLB.format(KEY="step_interval"),
    "eplb-window-size": _EPLB.format(KEY="window_size"),
    "expand-tools-even-if-tool-choice-none": "tools are in the prompt unless "
    "exclude-tools-when-tool-choice-none is set; remove it",
    "forced-num-gpu-blocks": "num-gpu-blocks-override is its successor",
    "guided-decoding-backend": _STRUCTURED.format(KEY="backend"),
    "guided-decoding-disable-additional-properties": _STRUCTURED.format(
        KEY="disable_additional_properties"
    ),
    "guided-decoding-disable-any-whitespace": _STRUCTURED.format(KEY="disable_any_whitespace"),
    "guided-decoding-disable-fallback": "there is no fallback unless the backend is `auto`; "
    "remove it",
    "image-feature-size": _IMAGES,
    "image-input-shape": _IMAGES,
    "image-input-type": _IMAGES,
    "image-processor": _IMAGES,
    "image-processor-revision": _IMAGES,
    "image-token-id": _IMAGES,
    "logits-processor-pattern": "logits-processors, which names the classes, is its successor",
    "long-lora-scaling-factors": "long-context LoRA adapters are gone; remove it",
    "lora-extra-vocab-size": "LoRA adapters with tokens of their own are gone; remove it",
    "max-context-len-to-capture": _GRAPHS,
    "max-long-partial-prefills": _SCHEDULER,
    "max-num-partial-prefills": _SCHEDULER,
    "max-paddings": _SCHEDULER,
    "max-prompt-adapter-token": _PROMPT_ADAPTER,
    "max-prompt-adapters": _PROMPT_ADAPTER,
    "max-seq-len-to-capture": _GRAPHS,
    "mm-cache-preprocessor": "mm-processor-cache-gb is its successor",
    "mm-placeholder-str-override": _IMAGES,
    "multi-step-stream-outputs": "multi-step scheduling is gone; remove it",
    "ngram-prompt-lookup-max": _SPECULATIVE.format(KEY="prompt_lookup_max"),
    "ngram-prompt-lookup-min": _SPECULATIVE.format(KEY="prompt_lookup_min"),
    "num-lookahead-slots": _SCHEDULER,
    "num-redundant-experts": _EPLB.format(KEY="num_redundant_experts"),
    "num-scheduler-steps": "multi-step scheduling is gone; remove it",
    "num-speculative-tokens": _SPECULATIVE.format(KEY="num_speculative_tokens"),
    "override-attention-dtype": "dtype sets the type of the whole model; remove it",
    "override-neuron-config": "additional-config is its successor",
    "override-pooler-config": "pooler-config is its successor",
    "pooling-norm": _POOLER.format(KEY="use_activation"),
    "pooling-returned-token-ids": _POOLER.format(KEY="returned_token_ids"),
    "pooling-softmax": _POOLER.format(KEY="use_activation"),
    "pooling-step-tag-id": _POOLER.format(KEY="step_tag_id"),
    "pooling-type": _POOLER.format(KEY="pooling_type"),
    "preemption-mode": "a preempted request is always computed again; remove it",
    "prompt-adapters": _PROMPT_ADAPTER,
    "qlora-adapter-name-or-path": "lora-modules is its successor",
    "quantization-param-path": "scales of the KV cache come with the model's weights; remove it",
    "rope-scaling": "write `rope_parameters` into the JSON of hf-overrides",
    "rope-theta": "write `rope_parameters` with `rope_theta` into the JSON of hf-overrides",
    "scheduler-delay-factor": _SCHEDULER,
    "spec-decoding-acceptance-method": _SPECULATIVE.format(KEY="rejection_sample_method"),
    "speculative-disable-by-batch-size": _SPECULATIVE.format(
        KEY="num_speculative_tokens_per_batch_size"
    ),
    "speculative-disable-mqa-scorer": "that scorer is gone; remove it",
    "speculative-draft-tensor-parallel-size": _SPECULATIVE.format(KEY="draft_tensor_parallel_size"),
    "speculative-max-model-len": _SPECULATIVE.format(KEY="max_model_len"),
    "speculative-model": _SPECULATIVE.format(KEY="model"),
    "speculative-model-quantization": _SPECULATIVE.format(KEY="quantization"),
    "swap-space": "preempted requests are computed again, not swapped; remove it, or set "
    "kv-offloading-size for a KV cache in the CPU's memory",
    "task": "`runner: pooling` or `runner: generate`, and convert, are its successors",
    "tokenizer-pool-extra-config": "renderer-num-workers is the successor of the tokenizer pool",
    "tokenizer-pool-size": "renderer-num-workers is the successor of the tokenizer pool",
    "tokenizer-pool-type": "renderer-num-workers is the successor of the tokenizer pool",
    "typical-acceptance-sampler-posterior-alpha": "that sampler is gone; remove it",
    "typical-acceptance-sampler-posterior-threshold": "that sampler is gone; remove it",
    "use-dummy-weights": "load-format: dummy is its successor",
    "use-np-weights": "load-format is its successor",
    "use-v2-block-manager": "vLLM has one block manager; remove it",
    "worker-use-ray": _WORKERS,
}

# How similar two words of a flag are, at the least: `modle` and `model` are 0.8.
_SIMILAR = 0.75
# How similar two flags are that differ in their dashes, at the least.
_SIMILAR_JOINED = 0.9


def explain_removed_flag(name: str) -> str | None:
    """Return what to do in place of a flag that vLLM no longer has, None for any other name."""
    return REMOVED_FLAGS.get(name) or REMOVED_FLAGS.get(name.removeprefix("no-"))


def nearest_flag(name: str, known: Collection[str]) -> str | None:
    """Return the known flag that a misspelled one means, None if that is not clear.

    Every word must be like its counterpart: flags that share most of their letters may be each
    other's opposite (`enable-…`, `disable-…`), or about different things.
    """
    words = name.split("-")
    ranked = sorted(
        ((_similarity(name, flag), flag) for flag in known if _alike(words, flag)), reverse=True
    )
    return ranked[0][1] if ranked else None


def _alike(words: list[str], flag: str) -> bool:
    others = flag.split("-")
    if len(words) == len(others):
        return all(map(_same_word, words, others))
    return _similarity("".join(words), "".join(others)) >= _SIMILAR_JOINED and _same_word(
        words[0][:6], "".join(others)[:6]
    )


def _same_word(one: str, other: str) -> bool:
    """Return whether a word is another one misspelled, cut short or made longer."""
    short, long = sorted((one, other), key=len)
    return _similarity(one, other) >= _SIMILAR or (len(short) >= 3 and long.startswith(short))


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
