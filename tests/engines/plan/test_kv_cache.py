"""The division of the KV cache, beside the figures of vLLM 0.32's own functions."""

import pytest

from engines.plan.architecture import Kind
from engines.plan.kv_cache import LayerCache, divide

# Layers as kind, number, bytes per token, window; then tokens per block, tokens in flight, context
# length, bytes of the cache; then vLLM's bytes of one request, and its tokens.
ROWS: list[tuple[list[tuple[Kind, int, int, int]], int, int, int, int, int, int]] = [
    ([("full", 35, 8192, 0)], 128, 2048, 1000, 28209264931, 293601280, 96000),
    ([("sliding", 37, 4096, 4096)], 16, 4096, 1000, 42636321356, 155189248, 274734),
    (
        [("full", 14, 512, 0), ("sliding", 13, 1024, 1024)],
        16, 2048, 40960, 7975659904, 337870848, 966884,
    ),
    (
        [("full", 5, 4096, 0), ("chunked", 19, 2048, 4096)],
        16, 4096, 1000, 34593429372, 62586880, 552722,
    ),
    (
        [("full", 4, 2048, 0), ("sliding", 40, 2048, 4096), ("sliding", 12, 512, 1024)],
        128, 4096, 40960, 13256465871, 1051721728, 516267,
    ),
    (
        [("full", 38, 512, 0), ("sliding", 22, 8192, 4096), ("sliding", 7, 512, 1024)],
        128, 4096, 262144, 28642253696, 7574913024, 991168,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "block", "in_flight", "length", "available", "request_bytes", "tokens"), ROWS
)
def test_cache_is_divided_as_vllm_divides_it(
    layers: list[tuple[Kind, int, int, int]],
    block: int,
    in_flight: int,
    length: int,
    available: int,
    request_bytes: int,
    tokens: int,
) -> None:
    caches = [
        LayerCache(kind, window, size) for kind, number, size, window in layers
        for _ in range(number)
    ]  # fmt: skip
    pool = divide(caches, block, in_flight)
    assert pool.request_bytes(length) == request_bytes
    assert pool.capacity(available, length).tokens == tokens
    assert pool.longest_request(request_bytes, length) == length
    assert pool.longest_request(request_bytes - 1, length) < length


def test_without_the_hybrid_manager_every_layer_keeps_every_token() -> None:
    caches = [LayerCache("full", 0, 1024), LayerCache("sliding", 128, 1024)]
    assert divide(caches, 16, 2048, hybrid=False).request_bytes(16_000) == 16_000 * 2048
    assert divide(caches, 16, 2048).request_bytes(16_000) < 16_000 * 2048


def test_cache_without_room_holds_nothing() -> None:
    pool = divide([LayerCache("full", 0, 1024)], 16, 2048)
    assert pool.capacity(-5, 100).tokens == 0
    assert pool.longest_request(16_383, 100) == 0
