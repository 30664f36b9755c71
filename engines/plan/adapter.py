"""Finds LoRA adapters that cannot work with a model, by the files of both.

vLLM 0.32 checks the rank alone. An adapter of another base model loads without an error, and
answers nonsense.
"""

import re
from collections.abc import Mapping, Sequence

from engines.plan.architecture import text_config
from engines.plan.faults import PlanError
from engines.plan.model_files import (
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    Tensor,
    find_directory,
    read_config,
    read_header,
    read_model_files,
    read_object,
)
from engines.spec import LocalSpec

ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Of older versions of PEFT; vLLM reads them, and their headers are not read here.
OTHER_WEIGHTS = ("adapter_model.bin", "adapter_model.pt")
# vLLM's default of --max-lora-rank.
MAX_RANK = 16
# Modules whose input, or output, is as wide as the model's hidden size.
_IN_HIDDEN = re.compile(r"\.(?:q_proj|k_proj|v_proj|gate_proj|up_proj)\.lora_A\.(?:\w+\.)?weight$")
_OUT_HIDDEN = re.compile(r"\.(?:o_proj|down_proj)\.lora_B\.(?:\w+\.)?weight$")
_LAYER = re.compile(r"\.layers\.(\d{1,6})\.")
_MODULE = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.(?:\w+\.)?weight")
# Types of weights with the shape of their module; packed ones have another.
_PLAIN = frozenset({"BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"})
# Parts of a model with layers of their own.
_TOWERS = ("visual", "vision", "audio")


def find_adapter_fault(spec: LocalSpec, source: str) -> str | None:
    """Return why an engine cannot use an adapter; None: it can, as far as the files here say.

    Blocks. A repository that is not in the cache is not looked at.
    """
    here = spec.path_here(source)
    if here is None:
        return None
    try:
        path = find_directory(here)
    except PlanError:
        if source.startswith(("/", "./", "../", "~")):
            return f"adapter directory {source} does not exist"
        return None
    try:
        config = read_object(path / ADAPTER_CONFIG, MAX_CONFIG_BYTES)
        if fault := _rank_fault(config, spec.args):
            return f"{path / ADAPTER_CONFIG}: {fault}"
        if not (path / WEIGHTS).exists():
            if any((path / name).exists() for name in OTHER_WEIGHTS):
                return None
            return f"directory {source} holds no {WEIGHTS}"
        tensors, _ = read_header(path / WEIGHTS, MAX_HEADER_BYTES)
    except PlanError as error:
        return str(error)
    if (model := spec.path_here(spec.model)) is None:
        return None
    try:
        fault = _config_fault(tensors, spec.model, text_config(read_config(model)))
        fault = fault or _shape_fault(tensors, spec.model, read_model_files(model).tensors)
    except PlanError:  # the model has its own check
        return None
    return None if fault is None else f"adapter {source} is for another base model: {fault}"


def _rank_fault(config: Mapping[str, object], args: Mapping[str, object]) -> str | None:
    rank, patterns = config.get("r"), config.get("rank_pattern")
    if type(rank) is not int or rank < 1:
        return "r is not a rank, so this is no LoRA adapter in PEFT's format"
    special = patterns.values() if isinstance(patterns, dict) else ()
    largest = max([rank, *(one for one in special if type(one) is int)])
    most = args.get("max-lora-rank", MAX_RANK)
    if isinstance(most, int) and largest > most:
        return f"its rank is {largest}, and max-lora-rank is {most}: set max-lora-rank in args"
    return None


def _config_fault(tensors: Sequence[Tensor], model: str, base: Mapping[str, object]) -> str | None:
    """Return what differs from the configuration of the base model."""
    hidden, layers = base.get("hidden_size"), base.get("num_hidden_layers")
    for tensor in tensors:
        if len(tensor.shape) != 2 or any(tower in tensor.name for tower in _TOWERS):
            continue
        width = None
        if _IN_HIDDEN.search(tensor.name):
            width = tensor.shape[1]
        elif _OUT_HIDDEN.search(tensor.name):
            width = tensor.shape[0]
        layer = _LAYER.search(tensor.name)
        if width is not None and type(hidden) is int and width != hidden:
            return f"its hidden size is {width}, that of {model} is {hidden}"
        if layer is not None and type(layers) is int and int(layer[1]) >= layers:
            return f"it has a layer {layer[1]}, {model} has {layers} layers"
    return None


def _shape_fault(tensors: Sequence[Tensor], model: str, base: Sequence[Tensor]) -> str | None:
    """Return which module of the adapter has another width than the same of the base model."""
    shapes = {one.name: one.shape for one in base if one.dtype in _PLAIN and len(one.shape) == 2}
    for tensor in tensors:
        module = _MODULE.fullmatch(tensor.name)
        if module is None or len(tensor.shape) != 2:
            continue
        name, matrix = module.groups()
        shape = shapes.get(f"{name}.weight")
        if shape is None:
            continue
        side, width, wanted = (
            ("input", tensor.shape[1], shape[1])
            if matrix == "A"
            else ("output", tensor.shape[0], shape[0])
        )
        if width != wanted:
            return f"the {side} of {name[:100]} is {width} wide, in {model} it is {wanted}"
    return None
