"""The command line: thin, every fault one line, exit code 2 for what the user can mend."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from app.cli import version
from app.cli.bench import PASSED_ON, bench
from app.cli.check import check
from app.cli.faults import ConfigOption, fail, faults
from app.cli.generate import PlainHelp, generate
from app.cli.import_config import importing
from app.cli.keys import keys
from app.cli.log_level import log_level
from app.cli.logs import logs
from app.cli.models import models
from app.cli.owners import owners
from app.cli.reload import reload
from app.cli.status import status
from app.cli.usage import usage
from app.settings import load_settings

app = typer.Typer(
    name="vllm-gateway",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(keys, name="keys")
app.add_typer(owners, name="owners")
app.add_typer(models, name="models")
app.add_typer(importing, name="import")
app.command()(check)
app.command()(status)
app.command()(logs)
app.command("log-level")(log_level)
app.command()(usage)
app.command()(reload)
app.command(cls=PlainHelp)(generate)
app.command(context_settings=PASSED_ON)(bench)


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
    """The gateway a team puts in front of its vLLM engines."""


@app.command()
def serve(
    config: ConfigOption = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="Accept the key in this file too, made if missing, and show it."),
    ] = None,
) -> None:
    """Run the gateway."""
    from app.server.demo_key import read_or_make
    from app.server.run import serve as run
    from app.telemetry.logs.setup import configured

    with faults():
        key = read_or_make(key_file) if key_file else None
        source = partial(load_settings, config, extra_keys=[key] if key else [])
        settings = source()
        with configured(settings.logs) as output:
            run(settings, banner_key=key, source=source, output=output)


@app.command("demo-model")
def demo_model(directory: Annotated[Path, typer.Argument(help="Where to put it.")]) -> None:
    """Train the tiny memorised demo model (about half a minute on a CPU)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from engines.demo.model import DemoModelError, build_demo_model

    columns = (
        TextColumn("training the demo model"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=Console(stderr=True), transient=False) as bar:
            task = bar.add_task("train", total=None)
            bar.update(task, visible=False)
            built = build_demo_model(
                directory,
                lambda step, total: bar.update(task, completed=step, total=total, visible=True),
            )
    except (DemoModelError, OSError) as error:
        fail(str(error))
    if built:
        print(f"demo model written to {directory}")


def main() -> None:
    """Entry point of the command. A reader that leaves early (`| head -1`) ends it quietly."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # it is None where the shell closed it (`>&-`)
                sys.stdout.flush()  # not at the interpreter's exit, which would print the error
    except BrokenPipeError:
        # What is left in the buffer goes nowhere. The status is click's own for this.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
