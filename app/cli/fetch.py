"""`vllm-gateway fetch`: download a model's files before an engine needs them."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.cli.faults import EXIT_FAILED, EXIT_INTERRUPTED, complain, fail, faults

if TYPE_CHECKING:
    from engines.download import Download

# Interval of the progress on a terminal, and of its lines elsewhere, in seconds.
REFRESH_S, LINE_S = 0.5, 10.0
# Attempts while the hub refuses requests for a time that it names.
MAX_ATTEMPTS = 5
Hub = Literal["huggingface", "modelscope"]


def fetch(
    model: Annotated[
        str,
        typer.Argument(help="Name of the model on the hub: OWNER/NAME.", show_default=False),
    ],
    hub: Annotated[
        Hub,
        typer.Option(
            "--from", help="Hub of the model; modelscope needs the package modelscope, and --to."
        ),
    ] = "huggingface",
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory for the files, to name as `model`; default: the cache of Hugging Face, "
            "where engines find the model by its name.",
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            help="Branch, tag or commit; default: main, of modelscope: master.", show_default=False
        ),
    ] = None,
) -> None:
    """Download a model from the Hugging Face hub, its mirror in HF_ENDPOINT, or ModelScope.

    Prints the model's directory. Files that are complete here are not downloaded again. Exit code 1
    if the download fails.
    """
    from engines.download import DownloadError, TooManyRequests

    with faults():
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                print(_fetch(hub, model, revision, to))
                return
            except TooManyRequests as error:
                if attempt == MAX_ATTEMPTS:
                    fail(str(error), code=EXIT_FAILED)
                complain(f"{error}; waiting")
                time.sleep(error.wait_s)
            except DownloadError as error:
                fail(str(error), code=EXIT_FAILED)


def _fetch(hub: Hub, model: str, revision: str | None, to: Path | None) -> Path:
    from engines.download import format_bytes
    from engines.hub_download import plan_download
    from engines.modelscope_download import plan_modelscope_download

    # Read when huggingface_hub is imported.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    find = plan_modelscope_download if hub == "modelscope" else plan_download
    plan: Download = find(model, revision, to)
    plan.check_disk()
    have = plan.total - plan.missing
    print(
        f"{model}: {len(plan.files)} files, {format_bytes(plan.total)}"
        + (f", {format_bytes(have)} of them here" if have else ""),
        file=sys.stderr,
    )
    if left := plan.leftover():
        complain(
            f"{format_bytes(left)} in {plan.place} are half files (*.incomplete) of downloads that "
            "were killed, or still run; no run goes on with them: delete them if none runs"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _progress(plan):
            # In a thread, because huggingface_hub delays Ctrl-C until whole files have arrived.
            return ThreadPoolExecutor(1).submit(plan.run).result()
    except KeyboardInterrupt:
        plan.discard_halves()
        complain("interrupted; run the command again: complete files are not downloaded twice")
        os._exit(EXIT_INTERRUPTED)  # without waiting for the threads of the download


@contextmanager
def _progress(plan: "Download") -> Iterator[None]:
    """Show bytes, rate and time left on standard error: a bar on a terminal, else lines."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    before, ended = plan.arrived(), threading.Event()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=plan.missing)

        def watch() -> None:
            interval = REFRESH_S if console.is_terminal else LINE_S
            began = time.monotonic()
            while not ended.wait(interval):
                done = min(max(plan.arrived() - before, 0), plan.missing)
                bar.update(task, completed=done)
                if not console.is_terminal:
                    line = progress_line(done, plan.missing, time.monotonic() - began)
                    print(line, file=sys.stderr, flush=True)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
            bar.update(task, completed=plan.missing)
        finally:
            ended.set()
            watcher.join()


def progress_line(done: int, total: int, elapsed_s: float) -> str:
    """Return progress as a line for a log: bytes, rate, and time left."""
    from engines.download import format_bytes

    rate = done / elapsed_s if elapsed_s > 0 else 0.0
    left = f", {(total - done) / rate:,.0f} s left" if rate else ""
    return f"{format_bytes(done)} of {format_bytes(total)}, {format_bytes(int(rate))}/s{left}"
