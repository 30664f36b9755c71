"""`vllm-gateway demo-model`: write the tiny model of the demo to a directory."""

from pathlib import Path
from typing import Annotated

import typer

from app.cli.faults import fail


def demo_model(
    directory: Annotated[Path, typer.Argument(help="Directory to write the model to.")],
    train: Annotated[
        bool, typer.Option("--train", help="Train it here, in about half a minute on a CPU.")
    ] = False,
) -> None:
    """Write the tiny memorised demo model to a directory."""
    from engines.demo import DemoModelError, copy_demo_model

    try:
        if train:
            _train(directory)
        elif not copy_demo_model(directory):
            return
    except (DemoModelError, OSError) as error:
        fail(str(error))
    print(f"demo model written to {directory}")


def _train(directory: Path) -> None:
    """Train the model with a progress bar; see `train_demo_model`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from engines.demo import train_demo_model

    columns = (
        TextColumn("training the demo model"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=False) as bar:
        task = bar.add_task("train", total=None, visible=False)
        train_demo_model(
            directory,
            lambda step, total: bar.update(task, completed=step, total=total, visible=True),
        )
