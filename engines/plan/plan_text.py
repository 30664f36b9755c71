"""A plan in lines for people."""

from collections import Counter
from collections.abc import Iterator

from engines.plan.memory_plan import GIB, MemoryPlan

KIB = 2**10


def plan_lines(plan: MemoryPlan) -> Iterator[str]:
    """Yield the lines of a plan: sizes, capacity, what is not known, and what to change."""
    if (text := _weights(plan)) is not None:
        yield text
    if (text := _cache(plan)) is not None:
        yield text
    if (text := _memory(plan)) is not None:
        yield text
    if (text := _capacity(plan)) is not None:
        yield text
    if (text := _too_long(plan)) is not None:
        yield text
    for text in plan.unknown:
        yield f"not known: {text}"
    if plan.fits is False:
        yield from _change(plan)


def _weights(plan: MemoryPlan) -> str | None:
    if not plan.model.tensors:
        return None
    files = f"{plan.model.files} file{'s' if plan.model.files != 1 else ''}"
    text = f"weights: {_gib(plan.disk_bytes)} in {files}"
    if plan.weight_bytes is not None:
        text += f", {_gib(plan.weight_bytes)} in {_memory_name(plan)}"
    return text


def _cache(plan: MemoryPlan) -> str | None:
    if plan.architecture is None or plan.token_bytes is None:
        return None
    kinds = Counter((one.kind, one.window, one.latent) for one in plan.architecture.layers)
    parts = []
    for (kind, window, latent), count in kinds.items():
        name = {"full": "full attention", "sliding": "window", "chunked": "chunks"}[kind]
        if latent:
            name = "latent attention"
        parts.append(f"{count} × {name}{f' of {window:,} tokens' if window else ''}")
    kept = "at most " if len(kinds) > 1 else ""
    return (
        f"KV cache: {kept}{plan.token_bytes / KIB:,.4g} KiB per token in {_memory_name(plan)}, "
        f"{plan.cache_type} ({', '.join(parts)})"
    )


def _memory(plan: MemoryPlan) -> str | None:
    options = plan.options
    if plan.cache_bytes is None or options.cache_bytes is not None:
        return None
    if options.gpu_gib is None or plan.weight_bytes is None or plan.overhead_bytes is None:
        return None
    left = f"{_gib(plan.cache_bytes)} left for the KV cache"
    if plan.cache_bytes < 0:
        left = f"{_gib(-plan.cache_bytes)} too little"
    return (
        f"memory: {options.gpu_gib:g} GiB × {options.share:g}, less weights and about "
        f"{_gib(plan.overhead_bytes)} for activations and CUDA (an estimate): {left}"
    )


def _capacity(plan: MemoryPlan) -> str | None:
    found, length = plan.capacity, plan.context_length
    if found is None or length is None:
        return None
    text = (
        f"capacity: {found.tokens:,} tokens, {found.concurrency:,.2f} requests of {length:,} "
        "tokens at once"
    )
    if plan.architecture is not None and len({one.kind for one in plan.architecture.layers}) > 1:
        text += f" ({found.every_layer_tokens:,} tokens as older versions of vLLM count)"
    return text


def _too_long(plan: MemoryPlan) -> str | None:
    given = plan.options.max_model_len or 0
    if plan.architecture is None or given <= plan.architecture.context_length:
        return None
    return (
        f"vLLM will refuse max-model-len {given:,}: the context of the model has "
        f"{plan.architecture.context_length:,} tokens, unless hf-overrides raises it"
    )


def _change(plan: MemoryPlan) -> Iterator[str]:
    length = plan.context_length or 0
    yield f"does not fit: one request of {length:,} tokens needs more than is left"
    if plan.advice:
        yield f"change one: {'; '.join(plan.advice)}"
    else:
        yield "change: a GPU with more memory, or more of them"


def _memory_name(plan: MemoryPlan) -> str:
    ranks = plan.options.tensor_parallel
    return "memory" if ranks == 1 else f"the memory of each of {ranks} GPUs"


def _gib(size: int) -> str:
    gib = size / GIB
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{size / 2**20:.2f} MiB"
