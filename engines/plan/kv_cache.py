"""The KV cache as vLLM 0.32 divides it: groups of layers, their blocks, and what fits.

Mirrors `get_kv_cache_groups` and `get_max_concurrency_for_kv_cache_config` of
`vllm/v1/core/kv_cache_utils.py`, for layers whose blocks lie one behind the other (the layouts of
its attention backends). Layers of one kind form one group. In a model that mixes kinds, all groups
draw blocks of one size from one pool, and have the same number of layers: those of the rarest kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines.plan.architecture import Kind, Layer
from engines.plan.faults import PlanError

# Bytes of an element, by the type of the cache. float32 is that of a model, never of the flag.
ELEMENT_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "fp8_ds_mla": 1,
}
# Values of --kv-cache-dtype whose size is known; "auto" is resolved before.
CACHE_TYPES = ("auto", *(name for name in ELEMENT_BYTES if name != "float32"))
# A token of DeepSeek-V3.2 in an fp8 cache: latent vector, scales and positions in one record.
SPARSE_FP8_BYTES = 656
# Groups are split by the rarest kind, unless the commonest is hardly commoner.
ALIKE = 1.5


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one GPU keeps of a layer, in bytes per token and tokens."""

    kind: Kind
    window: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class _Group:
    cache: LayerCache
    layers: int
    block_tokens: int
    block_bytes: int

    def blocks(self, tokens: int, in_flight: int) -> int:
        """Return the blocks of a request of that many tokens."""
        match self.cache.kind:
            case "full":
                return -(-tokens // self.block_tokens)
            case "chunked":
                return -(-min(self.cache.window + in_flight, tokens) // self.block_tokens)
            case "sliding":
                # One more, since a window need not start with a block.
                kept = min(self.cache.window - 1 + in_flight, tokens)
                return -(-kept // self.block_tokens) + 1


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a KV cache holds."""

    tokens: int
    """Tokens in requests of the full context length, which vLLM 0.32 logs."""
    concurrency: float
    """Requests of the full context length at once."""
    every_layer_tokens: int
    """Tokens if each layer kept every token, which older versions of vLLM log."""


@dataclass(frozen=True, slots=True)
class CachePool:
    """The pool of blocks of one GPU. `in_flight` is the number of tokens scheduled at once."""

    groups: tuple[_Group, ...]
    in_flight: int

    @property
    def bytes_per_block(self) -> int:
        return max(group.layers * group.block_bytes for group in self.groups)

    def request_bytes(self, tokens: int) -> int:
        """Return the bytes of one request."""
        blocks = sum(group.blocks(tokens, self.in_flight) for group in self.groups)
        return blocks * self.bytes_per_block

    def capacity(self, cache_bytes: int, context_length: int) -> Capacity:
        """Return what a cache of that many bytes holds."""
        blocks = max(cache_bytes, 0) // self.bytes_per_block
        concurrency = blocks * self.bytes_per_block / self.request_bytes(context_length)
        smallest = min(group.block_tokens for group in self.groups)
        return Capacity(
            tokens=int(concurrency * context_length),
            concurrency=concurrency,
            every_layer_tokens=blocks // len(self.groups) * smallest,
        )

    def longest_request(self, cache_bytes: int, context_length: int) -> int:
        """Return the tokens of the longest request that fits; 0: none does."""
        low, high = 0, context_length
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_bytes(middle) <= cache_bytes:
                low = middle
            else:
                high = middle - 1
        return low


def layer_caches(
    layers: Sequence[Layer], cache_type: str, tensor_parallel: int, *, sparse: bool = False
) -> list[LayerCache]:
    """Return what one GPU keeps of each layer. Raises PlanError for an unknown type of cache."""
    if (element := ELEMENT_BYTES.get(cache_type)) is None:
        raise PlanError(f"the size of a {cache_type[:50]} KV cache is not known")
    caches = []
    for layer in layers:
        heads = layer.heads if layer.latent else max(1, layer.heads // tensor_parallel)
        size = heads * layer.width * element
        if sparse and element == 1:
            size = SPARSE_FP8_BYTES
        caches.append(LayerCache(layer.kind, layer.window, size))
        if layer.fixed_bytes:
            caches.append(LayerCache("full", 0, layer.fixed_bytes))
    return caches


def divide(
    caches: Sequence[LayerCache], block_tokens: int, in_flight: int, *, hybrid: bool = True
) -> CachePool:
    """Return the pool of blocks for layers; `hybrid` is vLLM's hybrid KV cache manager."""
    if not hybrid and any(cache.kind == "full" for cache in caches):
        caches = [replace(cache, kind="full", window=0) for cache in caches]
    if len({(cache.kind, cache.window) for cache in caches}) == 1:
        size = sum(cache.token_bytes for cache in caches) * block_tokens
        return CachePool((_Group(caches[0], 1, block_tokens, size),), in_flight)
    page = max(cache.token_bytes for cache in caches) * block_tokens
    kinds: dict[LayerCache, int] = {}
    for cache in caches:
        kinds[cache] = kinds.get(cache, 0) + 1
    fewest, most = min(kinds.values()), max(kinds.values())
    size = most if most < fewest * ALIKE else fewest
    groups: list[_Group] = []
    for cache, count in kinds.items():
        own = cache.token_bytes * block_tokens
        # A smaller page has more tokens, or is padded if that does not come out even.
        tokens = block_tokens * (page // own) if page % own == 0 else block_tokens
        number = -(-count // size)
        groups += [_Group(cache, -(-count // number), tokens, page)] * number
    return CachePool(tuple(groups), in_flight)
