"""`vllm-gateway demo-model`: train the tiny model of the demo."""

from pathlib import Path
from typing import Annotated

import typer

from app.cli.faults import fail


def demo_model(
    directory: Annotated[Path, typer.Argument(help="Directory to write the model to.")],
) -> None:
    """Train the tiny memorised demo model (about half a minute on a CPU)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from engines.demo import DemoModelError, build_demo_model

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
