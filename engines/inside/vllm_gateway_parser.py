"""vLLM's parser of the flags of `vllm serve`, in every version. Standard library and vLLM only.

It is in `entrypoints.common` from vLLM 0.33 on, in `launchers` from 0.30 on, before in `openai`.
"""

from importlib import import_module
from typing import Any

_PACKAGES = ("common", "launchers", "openai")


def import_cli_args() -> Any:
    """Return vLLM's module with `make_arg_parser`. Takes seconds. Raises ImportError."""
    for package in _PACKAGES:
        try:
            return import_module(f"vllm.entrypoints.{package}.cli_args")
        except ModuleNotFoundError as error:
            # A package that vLLM itself misses is no matter of its version.
            if not (error.name or "").startswith("vllm.entrypoints."):
                raise
    raise ImportError("this version of vLLM has its parser in none of the known places")
