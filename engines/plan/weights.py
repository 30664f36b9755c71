"""The bytes of a model's weights on one GPU, by the tensors of its checkpoint."""

import re
from collections.abc import Sequence

from engines.plan.architecture import Architecture
from engines.plan.faults import PlanError
from engines.plan.model_files import Tensor

# Layers of a draft model, which vLLM loads for speculative decoding only.
_DRAFT = re.compile(r"(?:^|\.)mtp\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_VISION = re.compile(r"(?:^|\.)(?:vision|visual|audio|image|mm_|multi_modal|embed_vision)")
# Every GPU has the whole of these.
_REPLICATED = re.compile(
    r"(?:q_a_proj|kv_a_proj_with_mqa|router(?:\.\w+)*|mlp\.gate|block_sparse_moe\.gate|indexer\.\w+)"
    r"\.weight$"
)
_KEYS_OR_VALUES = re.compile(r"(?:k_proj|v_proj)\.\w+$")
# What `--quantization fp8` of an unquantized checkpoint leaves as it is.
_NOT_LINEAR = re.compile(r"(?:embed|lm_head|norm|router|mlp\.gate\.weight|scale)")
_MXFP4_EXPERTS = re.compile(r"experts\.\w+_(?:blocks|scales)$")
# vLLM's MXFP4 kernels (Marlin, TRT-LLM) take multiples of these widths.
_MXFP4_HIDDEN, _MXFP4_FEED_FORWARD = 256, 128
_FLOATS = ("F64", "F32", "F16", "BF16")


def checkpoint_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the weights on disk."""
    return sum(tensor.size for tensor in tensors)


def loaded_bytes(
    tensors: Sequence[Tensor],
    architecture: Architecture,
    tensor_parallel: int = 1,
    *,
    element_bytes: int = 2,
    quantization: str | None = None,
) -> int:
    """Return the bytes that the weights take on each GPU, with the tables of positions.

    `element_bytes` is the size of an element of the type that vLLM computes in. Raises PlanError
    for a quantization while loading of which the size is not known.
    """
    if architecture.quantization is not None:
        quantization = None  # the flag can only repeat what the checkpoint says
    if quantization not in (None, "fp8"):
        raise PlanError(
            f"the size of weights quantized by {quantization} while loading is not known"
        )
    total = 0.0
    for tensor in tensors:
        if not _is_loaded(tensor.name, architecture):
            continue
        size = _size(tensor, architecture, element_bytes, online_fp8=quantization == "fp8")
        shards = _shards(tensor, architecture, tensor_parallel)
        total += size / shards * _padding(tensor, architecture, tensor_parallel)
    return int(total) + architecture.rotary_elements * element_bytes


def _is_loaded(name: str, architecture: Architecture) -> bool:
    if _DRAFT.search(name) or (architecture.tied and name.endswith("lm_head.weight")):
        return False
    layer = _LAYER.search(name)
    return (
        layer is None
        or _VISION.search(name) is not None
        or int(layer[1]) < architecture.decoder_layers
    )


def _size(tensor: Tensor, architecture: Architecture, element: int, *, online_fp8: bool) -> int:
    """Return the bytes of a tensor in memory."""
    size = tensor.size
    if architecture.quantization is None and tensor.dtype in _FLOATS:
        size = tensor.elements * element
        if (
            online_fp8
            and len(tensor.shape) > 1
            and not _NOT_LINEAR.search(tensor.name)
            and not _VISION.search(tensor.name)
        ):
            size = tensor.elements
    if _is_shared_key(tensor, architecture):
        return 2 * size  # loaded as keys and once more as values
    return size


def _is_shared_key(tensor: Tensor, architecture: Architecture) -> bool:
    """Return whether a projection of keys is that of the values, too (Gemma 4's full attention)."""
    if not architecture.keys_are_values or not tensor.name.endswith("k_proj.weight"):
        return False
    full = next((layer for layer in architecture.layers if layer.kind == "full"), None)
    return full is not None and tensor.shape[:1] == (full.heads * full.width // 2,)


def _shards(tensor: Tensor, architecture: Architecture, tensor_parallel: int) -> int:
    if len(tensor.shape) < 2 or _REPLICATED.search(tensor.name):
        return 1
    if _KEYS_OR_VALUES.search(tensor.name):
        return min(tensor_parallel, architecture.kv_heads)
    return tensor_parallel


def _padding(tensor: Tensor, architecture: Architecture, tensor_parallel: int) -> float:
    """Return the factor by which kernels widen a tensor."""
    if architecture.quantization != "mxfp4" or not _MXFP4_EXPERTS.search(tensor.name):
        return 1.0
    if len(tensor.shape) < 3 or not tensor.elements:
        return 1.0
    down = "down_proj" in tensor.name
    # Rows, then groups of 32 columns: [experts, rows, groups, …].
    rows, columns = tensor.shape[1], tensor.shape[2] * 32
    hidden, feed_forward = (rows, columns) if down else (columns, rows // 2)
    if not feed_forward:  # one row is no expert
        return 1.0
    share = feed_forward / tensor_parallel
    return _rounded(hidden, _MXFP4_HIDDEN) / hidden * _rounded(share, _MXFP4_FEED_FORWARD) / share


def _rounded(value: float, step: int) -> int:
    return -int(-value // step) * step
