"""What an engine needs and what it can hold: the plan of a model's memory on one GPU."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

from engines.gpu import memory_share
from engines.plan.architecture import Architecture, read_architecture
from engines.plan.faults import PlanError
from engines.plan.kv_cache import CachePool, Capacity, divide, layer_caches
from engines.plan.model_files import ModelFiles
from engines.plan.weights import checkpoint_bytes, loaded_bytes
from engines.spec import FlagValue

GIB = 2**30
# Tokens per block of vLLM's CUDA backends, and of its CPU backend.
BLOCK_TOKENS, CPU_BLOCK_TOKENS = 16, 128
# vLLM's defaults for a server: from this much GPU memory, tokens and requests of one step.
STEP_DEFAULTS = ((160.0, 16384, 1024), (70.0, 8192, 1024), (0.0, 2048, 256))
# The CUDA context, graphs and workspaces; for tensor parallelism those of NCCL, too.
FIXED_GIB, PARALLEL_GIB = 1.0, 0.5
# Bytes per logit of the sampler: the values, and a sorted copy with their positions.
SAMPLER_BYTES = 16
SAFE_SHARE = 0.95
MAX_GPUS = 64
# As vLLM reads numbers: 32k is 32,000, 32K is 32,768.
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,6}(?=[kKmMgG]))?)([kKmMgG]?)")
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The flags of an engine that its memory depends on, and the memory of each GPU in GiB."""

    gpu_gib: float | None = None
    share: float = 0.92
    tensor_parallel: int = 1
    max_model_len: int | None = None
    kv_cache_type: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    step_tokens: int | None = None
    step_requests: int | None = None
    # Bytes of the KV cache where they are given and not what is left.
    cache_bytes: int | None = None
    block_tokens: int = BLOCK_TOKENS
    in_flight_tokens: int | None = None
    hybrid: bool = True

    @property
    def steps(self) -> tuple[int, int]:
        """Return the tokens and the requests of one step."""
        gib = self.gpu_gib or 0.0
        tokens, requests = next(rest for least, *rest in STEP_DEFAULTS if gib >= least)
        return self.step_tokens or tokens, self.step_requests or requests

    @property
    def in_flight(self) -> int:
        """Return the tokens in flight: of two steps, since vLLM schedules one ahead."""
        return self.in_flight_tokens or 2 * self.steps[0]

    def for_cpu(self) -> Self:
        """Return the options of vLLM's CPU build: larger blocks, and no step ahead."""
        larger = self.block_tokens == BLOCK_TOKENS
        return replace(
            self,
            block_tokens=CPU_BLOCK_TOKENS if larger else self.block_tokens,
            in_flight_tokens=self.steps[0],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of an engine. Sizes in bytes on each GPU; None where it is not known.

    `unknown` says in a line each what is not known.
    """

    model: ModelFiles
    options: PlanOptions
    architecture: Architecture | None
    disk_bytes: int
    weight_bytes: int | None = None
    token_bytes: int | None = None
    cache_type: str | None = None
    context_length: int | None = None
    overhead_bytes: int | None = None
    cache_bytes: int | None = None
    capacity: Capacity | None = None
    longest: int | None = None
    advice: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Return whether one request of the context length fits; None if that is not known."""
        return None if self.capacity is None else self.capacity.concurrency >= 1


def options_of(args: Mapping[str, FlagValue], gpu_gib: float | None) -> PlanOptions:
    """Return the options of an engine's flags. Raises PlanError for what is not planned."""
    for name in ("pipeline-parallel-size", "data-parallel-size", "nnodes", "speculative-config"):
        if args.get(name) not in (None, 1, "1"):
            raise PlanError(f"the memory of an engine with {name} is not known")
    try:
        share = float(memory_share(args))
    except ValueError as error:
        raise PlanError(str(error)) from None
    kv_type = args.get("kv-cache-dtype")
    quantization = args.get("quantization")
    return PlanOptions(
        gpu_gib=gpu_gib,
        share=share,
        tensor_parallel=_count(args, "tensor-parallel-size") or 1,
        max_model_len=_count(args, "max-model-len"),
        kv_cache_type="auto" if kv_type is None else str(kv_type),
        dtype=str(args.get("dtype") or "auto"),
        quantization=None if quantization is None else str(quantization),
        step_tokens=_count(args, "max-num-batched-tokens"),
        step_requests=_count(args, "max-num-seqs"),
        cache_bytes=_count(args, "kv-cache-memory-bytes"),
        block_tokens=_count(args, "block-size") or BLOCK_TOKENS,
        hybrid=args.get("disable-hybrid-kv-cache-manager") is not True,
    )


def plan_memory(model: ModelFiles, options: PlanOptions) -> MemoryPlan:
    """Return the plan of a model. Raises PlanError for options that no engine can have."""
    disk = checkpoint_bytes(model.tensors)
    try:
        architecture = read_architecture(model.config)
    except PlanError as error:
        return MemoryPlan(
            model=model, options=options, architecture=None, disk_bytes=disk, unknown=(str(error),)
        )
    _check(architecture, options)
    plan = _measure(model, architecture, options, disk)
    if plan.fits is False:
        return replace(plan, advice=tuple(_advice(plan, architecture)))
    return plan


def _check(architecture: Architecture, options: PlanOptions) -> None:
    if architecture.attention_heads % options.tensor_parallel:
        raise PlanError(
            f"{architecture.attention_heads} attention heads cannot be divided among "
            f"{options.tensor_parallel} GPUs: tensor-parallel-size must be a divisor of them"
        )


def _measure(
    model: ModelFiles, architecture: Architecture, options: PlanOptions, disk: int
) -> MemoryPlan:
    """Return the plan without advice."""
    unknown: list[str] = []
    element = 4 if options.dtype in ("float32", "float") else 2
    weights = None
    if not model.tensors:
        found = f" ({model.unread} is in another format)" if model.unread else ""
        unknown.append(f"the weights are not known: no safetensors file{found}")
    else:
        try:
            weights = loaded_bytes(
                model.tensors,
                architecture,
                options.tensor_parallel,
                element_bytes=element,
                quantization=options.quantization,
            )
        except PlanError as error:
            unknown.append(str(error))
    cache_type = options.kv_cache_type
    if cache_type == "auto":
        cache_type = architecture.cache_type or ("float32" if element == 4 else "bfloat16")
    length = options.max_model_len or architecture.context_length
    plan = MemoryPlan(
        model=model,
        options=options,
        architecture=architecture,
        disk_bytes=disk,
        weight_bytes=weights,
        cache_type=cache_type,
        context_length=length,
        overhead_bytes=_overhead(architecture, options, element),
    )
    try:
        pool = _pool(architecture, options, cache_type)
    except PlanError as error:
        return replace(plan, unknown=(*unknown, str(error)))
    every = layer_caches(
        architecture.layers, cache_type, options.tensor_parallel, sparse=architecture.sparse
    )
    plan = replace(
        plan, token_bytes=sum(cache.token_bytes for cache in every), unknown=tuple(unknown)
    )
    left = _cache_bytes(plan)
    if left is None:
        return plan
    return replace(
        plan,
        cache_bytes=left,
        capacity=pool.capacity(left, length),
        longest=pool.longest_request(left, length),
    )


def _pool(architecture: Architecture, options: PlanOptions, cache_type: str) -> CachePool:
    caches = layer_caches(
        architecture.layers, cache_type, options.tensor_parallel, sparse=architecture.sparse
    )
    return divide(caches, options.block_tokens, options.in_flight, hybrid=options.hybrid)


def _overhead(architecture: Architecture, options: PlanOptions, element: int) -> int:
    """Return an estimate of the activations of one step, and of what CUDA takes."""
    tokens, requests = options.steps
    ranks = options.tensor_parallel
    step = tokens * (3 * architecture.feed_forward // ranks + 4 * architecture.hidden_size)
    sampler = requests * architecture.vocabulary * SAMPLER_BYTES
    fixed = FIXED_GIB + (PARALLEL_GIB if ranks > 1 else 0.0)
    return max(step * element, sampler) + int(fixed * GIB)


def _cache_bytes(plan: MemoryPlan) -> int | None:
    """Return the bytes that are left for the KV cache; None if that is not known."""
    options = plan.options
    if options.cache_bytes is not None:
        return options.cache_bytes
    if options.gpu_gib is None or plan.weight_bytes is None or plan.overhead_bytes is None:
        return None
    return int(options.gpu_gib * options.share * GIB) - plan.weight_bytes - plan.overhead_bytes


def _advice(plan: MemoryPlan, architecture: Architecture) -> Iterator[str]:
    """Yield the changes each of which makes the model fit, the mildest first."""
    if plan.longest and plan.longest >= BLOCK_TOKENS:
        yield f"--max-model-len {plan.longest // BLOCK_TOKENS * BLOCK_TOKENS}"
    for flags, changed in _changes(plan, architecture):
        if _measure(plan.model, architecture, changed, plan.disk_bytes).fits:
            yield flags
            if changed.tensor_parallel > plan.options.tensor_parallel:
                break


def _changes(plan: MemoryPlan, architecture: Architecture) -> Iterator[tuple[str, PlanOptions]]:
    """Yield changes of an engine's flags that may help, the number of GPUs last."""
    options = plan.options
    if options.cache_bytes is None and options.share < SAFE_SHARE:
        yield f"--gpu-memory-utilization {SAFE_SHARE}", replace(options, share=SAFE_SHARE)
    if plan.cache_type in ("bfloat16", "float16"):
        yield "--kv-cache-dtype fp8", replace(options, kv_cache_type="fp8")
    if architecture.quantization is None and options.quantization is None:
        yield "--quantization fp8", replace(options, quantization="fp8")
    ranks = options.tensor_parallel * 2
    while ranks <= MAX_GPUS and architecture.attention_heads % ranks == 0:
        yield f"--tensor-parallel-size {ranks}", replace(options, tensor_parallel=ranks)
        ranks *= 2


def _count(args: Mapping[str, FlagValue], name: str) -> int | None:
    """Return a whole number above 0, which vLLM reads with a unit such as 32k, too."""
    value = args.get(name)
    if value is None or (name == "max-model-len" and str(value) in ("auto", "-1")):
        return None
    if (match := _NUMBER.fullmatch(str(value))) is not None and not isinstance(value, bool):
        number = int(Fraction(match[1]) * UNITS.get(match[2], 1))
        if number:
            return number
    raise PlanError(f"{name} must be a whole number above 0, not {str(value)[:50]!r}")
