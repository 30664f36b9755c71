"""`vllm-gateway import`: write a gateway.yaml from another program's configuration."""

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from app.cli.faults import fail, faults
from app.config_import import (
    ImportFault,
    ImportResult,
    from_litellm,
    from_llama_swap,
    from_vllm,
    render_yaml,
)
from app.config_import.reading import MAX_CHARACTERS

STANDARD_INPUT = "-"

import_config = typer.Typer(
    help="Write a gateway.yaml from a configuration of LiteLLM or llama-swap, or from a vLLM "
    "command line.",
    no_args_is_help=True,
)

SourceArgument = Annotated[
    str, typer.Argument(help="YAML file of the other program; `-`: standard input.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File to write; default: standard output."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]


@import_config.command("litellm")
def import_litellm(config: SourceArgument, output: Output = None, force: Force = False) -> None:
    """Import a config.yaml of LiteLLM's proxy. Its servers become remote engines."""
    _write(config, lambda text: from_litellm(text, os.environ), "litellm", output, force)


@import_config.command("llama-swap")
def import_llama_swap(config: SourceArgument, output: Output = None, force: Force = False) -> None:
    """Import a config.yaml of llama-swap. Its vLLM commands become models loaded on demand."""
    _write(config, lambda text: from_llama_swap(text, os.environ), "llama-swap", output, force)


@import_config.command("vllm")
def import_vllm(
    command_line: Annotated[
        str,
        typer.Argument(
            help="The command, quoted: `vllm serve MODEL …`, `python -m "
            "vllm.entrypoints.openai.api_server …` or `docker run … vllm/vllm-openai …`. It is "
            "parsed, never run."
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
    read: Callable[[str], ImportResult],
    program: str,
    output: Path | None,
    force: bool,
) -> None:
    with faults():
        _put(_imported(_text(config), read, config), program, output, force)


def _text(config: str) -> str:
    """Return the text of a file or of standard input, cut just above the importers' limit."""
    try:
        if config == STANDARD_INPUT:
            return TextIOWrapper(sys.stdin.buffer, encoding="utf-8").read(MAX_CHARACTERS + 1)
        with Path(config).open(encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError:
        fail(f"{config}: is not UTF-8")


def _imported(text: str, read: Callable[[str], ImportResult], source: str) -> ImportResult:
    try:
        return read(text)
    except ImportFault as fault:
        fail(f"{source}: {fault}")


def _put(imported: ImportResult, program: str, output: Path | None, force: bool) -> None:
    """Write the YAML, then print the variables to set and what was not imported."""
    text = render_yaml(imported, f"vllm-gateway import {program}")
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
