"""The commands of `vllm-gateway`, and its entry point."""

import os
import sys
from typing import Annotated

import typer

from app.cli import version
from app.cli.audit import audit
from app.cli.bench import PASS_THROUGH, bench
from app.cli.capture import capture
from app.cli.check import check
from app.cli.database import database
from app.cli.demo_model import demo_model
from app.cli.fetch import fetch
from app.cli.generate import PlainHelp, generate
from app.cli.import_config import import_config
from app.cli.keys import keys
from app.cli.log_level import log_level
from app.cli.logs import logs
from app.cli.models import models
from app.cli.owners import owners
from app.cli.plan import plan
from app.cli.reload import reload
from app.cli.requests import requests
from app.cli.serve import serve
from app.cli.status import status
from app.cli.usage import usage

app = typer.Typer(
    name="vllm-gateway",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(serve)
app.command()(check)
app.command()(plan)
app.command()(fetch)
app.add_typer(keys, name="keys")
app.add_typer(owners, name="owners")
app.add_typer(database, name="db")
app.command()(status)
app.add_typer(models, name="models")
app.command()(logs)
app.command("log-level")(log_level)
app.command()(usage)
app.add_typer(requests, name="requests")
app.command()(audit)
app.add_typer(capture, name="capture")
app.command()(reload)
app.command(cls=PlainHelp)(generate)
app.command(context_settings=PASS_THROUGH)(bench)
app.command("demo-model")(demo_model)
app.add_typer(import_config, name="import")


@app.callback()
def every_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=version.show,
            is_eager=True,
            help="Show the versions of the gateway and of vLLM.",
        ),
    ] = False,
) -> None:
    """One OpenAI-compatible API with keys, limits and usage in front of vLLM engines."""


def main() -> None:
    """Run the command line. A reader that closes the pipe early (`| head -1`) is no error."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # it is None where the shell closed it (`>&-`)
                sys.stdout.flush()  # here, because the interpreter's exit would print the error
    except BrokenPipeError:
        # Discard the rest of the buffer. The exit code is the one that click uses.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
