"""`vllm-gateway import`: a gateway.yaml from what another program was told."""

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from app.cli.faults import fail, faults
from app.importing import (
    Imported,
    SourceFault,
    from_litellm,
    from_llama_swap,
    from_vllm,
    rendered,
)
from app.importing.source import MAX_CHARACTERS

STANDARD_INPUT = "-"

importing = typer.Typer(
    help="Write a gateway.yaml from a configuration of LiteLLM or llama-swap, or from a command "
    "line of vLLM.",
    no_args_is_help=True,
)

ConfigArgument = Annotated[str, typer.Argument(help="Its YAML file; `-`: standard input.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="The file to write; default: standard output."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]


@importing.command("litellm")
def import_litellm(config: ConfigArgument, output: Output = None, force: Force = False) -> None:
    """Import the config.yaml of LiteLLM's proxy: servers become remote engines."""
    _write(config, lambda text: from_litellm(text, os.environ), "litellm", output, force)


@importing.command("llama-swap")
def import_llama_swap(config: ConfigArgument, output: Output = None, force: Force = False) -> None:
    """Import the config.yaml of llama-swap: vLLM commands become models on demand."""
    _write(config, lambda text: from_llama_swap(text, os.environ), "llama-swap", output, force)


@importing.command("vllm")
def import_vllm(
    command_line: Annotated[
        str,
        typer.Argument(
            help="In quotes: `vllm serve MODEL …`, `python -m vllm.entrypoints.openai.api_server "
            "…`, `docker run … vllm/vllm-openai …`. It is read, never run."
        ),
    ],
    output: Output = None,
    force: Force = False,
) -> None:
    """Import a command line that serves a model with vLLM."""
    with faults():
        _put(_imported(command_line, from_vllm, "the command line"), "vllm", output, force)


def _write(
    config: str,
    read: Callable[[str], Imported],
    program: str,
    output: Path | None,
    force: bool,
) -> None:
    with faults():
        _put(_imported(_text(config), read, config), program, output, force)


def _text(config: str) -> str:
    """Return the text of a file, or of standard input; of one that is too long, the beginning."""
    try:
        if config == STANDARD_INPUT:
            return TextIOWrapper(sys.stdin.buffer, encoding="utf-8").read(MAX_CHARACTERS + 1)
        with Path(config).open(encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError:
        fail(f"{config}: is not UTF-8")


def _imported(text: str, read: Callable[[str], Imported], source: str) -> Imported:
    try:
        return read(text)
    except SourceFault as fault:
        fail(f"{source}: {fault}")


def _put(imported: Imported, program: str, output: Path | None, force: bool) -> None:
    """Write the YAML, then say what was not carried over."""
    text = rendered(imported, f"vllm-gateway import {program}")
    if output is None:
        sys.stdout.write(text)
    else:
        try:
            with output.open("w" if force else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            fail(f"{output} exists; --force replaces it")
        print(f"wrote {output}", file=sys.stderr)
    for name, meaning in imported.variables.items():
        print(f"set {name}: {meaning}", file=sys.stderr)
    for note in imported.notes:
        print(note, file=sys.stderr)
