"""`vllm-gateway plan`: the memory of a model before it is loaded."""

from typing import Annotated

import typer

from app.cli.faults import EXIT_FAILED, fail

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="Directory of a model, or a repository in the cache of Hugging Face.",
        show_default=False,
    ),
]


def plan(
    model: ModelArgument,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=10_000,
            metavar="GIB",
            help="Memory of each GPU in GiB; default: that of the first GPU of this machine.",
        ),
    ] = None,
    max_model_len: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Context length; default: the model's."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of each GPU's memory that vLLM takes.")
    ] = 0.92,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of GPUs that share the model.")
    ] = 1,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Type of the KV cache: auto, bfloat16, float16, fp8.")
    ] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option(help="Quantization while loading; default: what the weights are."),
    ] = None,
) -> None:
    """Compute the memory of a model before it is loaded, from its files alone.

    Exit code 1 if the model does not fit.
    """
    from engines.plan import (
        CACHE_TYPES,
        PlanError,
        options_of,
        plan_lines,
        plan_memory,
        read_model_files,
    )

    if kv_cache_dtype not in CACHE_TYPES:
        known = ", ".join(CACHE_TYPES)
        fail(f"--kv-cache-dtype must be one of {known}, not {kv_cache_dtype[:50]!r}")
    args = {
        "max-model-len": max_model_len,
        "gpu-memory-utilization": gpu_memory_utilization,
        "tensor-parallel-size": tensor_parallel,
        "kv-cache-dtype": kv_cache_dtype,
        "quantization": quantization,
    }
    try:
        options = options_of(args, gpu_memory if gpu_memory is not None else _gpu_gib())
        found = plan_memory(read_model_files(model), options)
    except PlanError as error:
        fail(str(error))
    if found.architecture is not None:
        print(
            f"{found.architecture.name}: {found.architecture.decoder_layers} layers, context "
            f"length {found.architecture.context_length:,} tokens"
        )
    for line in plan_lines(found):
        print(line)
    if options.gpu_gib is None:
        print("this machine has no GPU: --gpu-memory 80 plans for GPUs with 80 GiB")
    if found.fits is False:
        raise SystemExit(EXIT_FAILED)


def _gpu_gib() -> float | None:
    """Return the memory of this machine's first GPU; None: it has none."""
    from engines.gpu import AcceleratorError, find_accelerator

    try:
        devices = find_accelerator().devices()
    except AcceleratorError:
        return None
    return next((device.total_gib for device in devices), None)
